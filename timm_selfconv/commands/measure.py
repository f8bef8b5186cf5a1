"""How good and how fast a net is: eval, bench."""
import argparse
import dataclasses
import json

from tabulate import tabulate

from timm_selfconv.measure import bench, evaluation
from .nets import create_model


def run_eval(args: argparse.Namespace) -> None:
    result = evaluation.evaluate(
        create_model(args.model, args.checkpoint, args.untrained, args.seed), args.data, split=args.split,
        batch_size=args.batch_size, data_dir=args.data_dir, input_key=args.input_key, target_key=args.target_key,
        device=args.device, class_map=args.class_map)
    if args.json:
        print(json.dumps(dict(model=args.model, **dataclasses.asdict(result)), indent=2))
        return
    print(f'{args.model}: top-1 {result.top1:.4f}, top-5 {result.top5:.4f} on {result.images} images, '
          f'{result.images_per_second:.0f} images a second')
    print(tabulate(result.per_class.items(), headers=('class', 'accuracy'), floatfmt='.3f'))


def run_bench(args: argparse.Namespace) -> None:
    rows = []
    model = create_model(args.model, args.checkpoint, args.checkpoint is None, args.seed)
    for size in args.img_size:
        times = bench.bench_paths(model, size, batch_size=args.batch_size)
        rows.append((f'{size} x {size}', 1e3 * times.dense, 1e3 * times.fused, times.ratio))
    print(f'{args.model}, batch {args.batch_size}, eval, float32: explicit attention maps against the path that runs')
    print(tabulate(rows, headers=('images', 'maps [ms]', 'path [ms]', 'ratio'), floatfmt='.2f'))
