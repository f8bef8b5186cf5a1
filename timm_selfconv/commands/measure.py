"""Accuracy and speed of a net: eval, bench."""
import dataclasses
import itertools
import json
from argparse import ArgumentParser, Namespace

from tabulate import tabulate
from tqdm import tqdm

from ._shared import add_data, add_fuse, add_model, create_model, fused, natural


def add_eval(parser: ArgumentParser) -> None:
    add_model(parser)
    add_fuse(parser)
    add_data(parser)
    parser.add_argument('--data', required=True, help="folder or timm dataset name, e.g. 'hfds/uoft-cs/cifar10'")
    parser.add_argument('--batch-size', type=natural, default=64)
    parser.add_argument('--target-key', default='label', help='column of the labels (default: label)')
    parser.add_argument('--class-map', metavar='FILE', help=(
        "timm's class map, a class name per line; without it classes are matched by their names"))
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--json', action='store_true', help='print JSON')


def run_eval(args: Namespace) -> None:
    """Measure accuracy on a dataset."""
    from timm_selfconv.measure.evaluation import evaluate

    model = fused(create_model(args.model, args.checkpoint, args.untrained, args.seed), args.fuse)
    result = evaluate(
        model, args.data, split=args.split, batch_size=args.batch_size, data_dir=args.data_dir,
        input_key=args.input_key, target_key=args.target_key, device=args.device, class_map=args.class_map)
    if args.json:
        print(json.dumps(dict(model=args.model, **dataclasses.asdict(result)), indent=2))
        return
    print(f'{args.model}: top-1 {result.top1:.4f}, top-5 {result.top5:.4f} on {result.images} images, '
          f'{result.images_per_second:.0f} images a second')
    print(tabulate(result.per_class.items(), headers=('class', 'accuracy'), floatfmt='.3f', disable_numparse=[0]))


def add_bench(parser: ArgumentParser) -> None:
    add_model(parser)
    add_fuse(parser)
    parser.add_argument('--img-size', type=natural, nargs='+', help="sides of the images (default: the net's own)")
    parser.add_argument(
        '--batch-size', type=natural, nargs='+', default=[1, 4, 32], help='images per batch (default: 1 4 32)')
    parser.add_argument('--dtype', nargs='+', default=['float32'], help='float32 (default), bfloat16 or both')
    parser.add_argument('--train', action='store_true', help='forward, loss and backward instead of eval forwards')
    parser.add_argument('--against', choices=['operators'], help=(
        'time the net beside itself without kernels, not beside the released algorithm'))
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--threads', type=natural, help='of the CPU (default: as torch chooses)')
    parser.add_argument('--seconds', type=float, default=3., help=(
        'each is run for, at least, unless turns have taken ten times as long (default: 3)'))
    parser.add_argument('--json', action='store_true', help='print JSON')


def run_bench(args: Namespace) -> None:
    """Measure speed and memory, beside the released algorithm and the net's matrix products."""
    import timm
    import torch
    from timm_selfconv.measure.bench import bench
    from timm_selfconv.measure.evaluation import find_device

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = find_device(args.device)
    has_weights = ':' in args.model or timm.is_model_pretrained(args.model)
    model = create_model(
        args.model, args.checkpoint, args.untrained or not (args.checkpoint or has_weights), args.seed).to(device)
    cuda = device.type == 'cuda'
    hardware = torch.cuda.get_device_name(device) if cuda else f'{device}, {torch.get_num_threads()} thread(s)'
    sizes = args.img_size or [model.pretrained_cfg['input_size'][-1]]
    each = itertools.product(args.dtype, sizes, args.batch_size)
    speeds = [
        speed for dtype, size, batch in tqdm(list(each), unit='size', leave=False, disable=None)
        for speed in bench(model, size, batch, dtype, args.train, args.fuse, args.seconds, args.against)]
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
