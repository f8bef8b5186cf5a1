"""How good and how fast a net is: eval, bench."""
import argparse
import dataclasses
import itertools
import json

import timm
import torch
from tabulate import tabulate
from tqdm import tqdm

from timm_selfconv.measure import bench, evaluation
from .nets import create_model, fused


def run_eval(args: argparse.Namespace) -> None:
    model = fused(create_model(args.model, args.checkpoint, args.untrained, args.seed), args.fuse)
    result = evaluation.evaluate(
        model, args.data, split=args.split, batch_size=args.batch_size, data_dir=args.data_dir,
        input_key=args.input_key, target_key=args.target_key, device=args.device, class_map=args.class_map)
    if args.json:
        print(json.dumps(dict(model=args.model, **dataclasses.asdict(result)), indent=2))
        return
    print(f'{args.model}: top-1 {result.top1:.4f}, top-5 {result.top5:.4f} on {result.images} images, '
          f'{result.images_per_second:.0f} images a second')
    print(tabulate(result.per_class.items(), headers=('class', 'accuracy'), floatfmt='.3f'))


def run_bench(args: argparse.Namespace) -> None:
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f'threads={args.threads}: needs at least 1')
        torch.set_num_threads(args.threads)
    device = evaluation.find_device(args.device)
    has_weights = ':' in args.model or timm.is_model_pretrained(args.model)
    model = create_model(
        args.model, args.checkpoint, args.untrained or not (args.checkpoint or has_weights), args.seed).to(device)
    cuda = device.type == 'cuda'
    hardware = torch.cuda.get_device_name(device) if cuda else f'{device}, {torch.get_num_threads()} threads'
    each = itertools.product(args.dtype, args.img_size, args.batch_size)
    speeds = [
        speed for dtype, size, batch in tqdm(list(each), unit='size', leave=False, disable=None)
        for speed in bench.bench(model, size, batch, dtype, args.train, args.fuse, args.seconds, args.against)]
    if args.json:
        print(json.dumps(dict(
            model=args.model, train=args.train, device=hardware, threads=torch.get_num_threads(),
            speeds=[dataclasses.asdict(speed) for speed in speeds]), indent=2))
        return
    print(f"{args.model}, {'forward and backward' if args.train else 'eval'}, {hardware}: "
          'medians of batches, all taking turns')
    print(tabulate(
        [(s.img_size, s.batch_size, s.dtype, s.path, s.turns, s.images_per_second, s.ratio, s.of_gemm_limit,
          s.peak_memory / 1e6) for s in speeds],
        headers=('pixels', 'batch', 'dtype', '', 'turns', 'images a second', 'ratio', 'of the GEMM limit', 'peak [MB]'),
        floatfmt=('', '', '', '', '', '.2f', '.2f', '.2f', '.1f'), missingval='-'))
