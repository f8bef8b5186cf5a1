"""The command findings."""
from argparse import Namespace

import torch
from tabulate import tabulate

from timm_selfconv.data import open_images
from timm_selfconv.look.findings import measure_findings
from timm_selfconv.measure.evaluation import evaluate
from ._shared import JSON, argument, command, show
from .use import demo_pictures
from .zoo import GROUP


@command(GROUP, argument('--all', metavar='DATA', help=(
    'also measure the findings that need pictures; DATA is CIFAR-10, as for eval (takes minutes)')), JSON)
def findings(args: Namespace) -> None:
    """Measure the findings about both papers again, from the shipped weights.

    Example: timm-selfconv findings
    """
    def accuracy(model: torch.nn.Module, split: str) -> float:
        with torch.autocast('cpu', torch.bfloat16):
            return evaluate(model, args.all, split).top1

    rows = measure_findings(*(open_images(demo_pictures()), accuracy) if args.all else ())
    show(args, rows, tabulate(rows, headers='keys', disable_numparse=True, maxcolwidths=[34, 40, None, None, None]))
