"""What the shipped nets say of the papers' findings: findings."""
import json
from argparse import ArgumentParser, Namespace

from tabulate import tabulate

from .look import demo_pictures


def add_findings(parser: ArgumentParser) -> None:
    parser.add_argument('--all', metavar='DATA', help=(
        "measure what needs the demo's pictures and CIFAR-10's test split too, a folder or name as for eval (an hour)"))
    parser.add_argument('--json', action='store_true', help='print JSON')


def run_findings(args: Namespace) -> None:
    """Measure the findings on both papers again, from the files that ship."""
    pictures = demo_pictures() if args.all else []
    import torch
    from timm_selfconv.data import open_images
    from timm_selfconv.look.findings import measure_findings
    from timm_selfconv.measure.evaluation import evaluate

    def accuracy(model: torch.nn.Module, split: str) -> float:
        with torch.autocast('cpu', torch.bfloat16):
            return evaluate(model, args.all, split).top1

    rows = measure_findings(open_images(pictures), accuracy if args.all else None)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        print(tabulate(rows, headers='keys', disable_numparse=True, maxcolwidths=[34, 40, None, None, None]))
