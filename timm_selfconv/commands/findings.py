"""The commands findings and shifts."""
import json
from argparse import Namespace
from typing import Any, Dict, List

import torch
from tabulate import tabulate

from timm_selfconv.data import open_images
from timm_selfconv.look.findings import Accuracy, measure_findings, shift_points
from timm_selfconv.measure.evaluation import evaluate
from ._shared import JSON, SPLIT, argument, command, create_model, model_name, output, show
from .use import demo_pictures
from .zoo import GROUP


def accuracy_on(data: str, split: str = 'test') -> Accuracy:
    return lambda model: torch.autocast('cpu', torch.bfloat16)(evaluate)(model, data, split).top1


@command(GROUP, argument('--all', metavar='DATA', help=(
    'also measure the findings that need pictures; DATA is CIFAR-10, as for eval (takes minutes)')), JSON)
def findings(args: Namespace) -> None:
    """Measure the findings about both papers on the shipped weights.

    Example: timm-selfconv findings
    """
    rows = measure_findings(*(open_images(demo_pictures()), accuracy_on(args.all)) if args.all else ())
    show(args, rows, tabulate(rows, headers='keys', disable_numparse=True, maxcolwidths=[34, 40, None, None, None]))


@command(
    GROUP, argument('models', nargs='+', type=model_name, metavar='MODEL', help='nets that attend by position only'),
    argument('--data', required=True, help='a folder or a name, as for eval'), SPLIT,
    output('FILE', 'figure: png, svg or pdf'))
def shifts(args: Namespace) -> None:
    """Measure accuracy against the number of heads that become pixel shifts, and draw it.

    Example: timm-selfconv shifts sa_quadratic_tiny_cifar --data hfds/uoft-cs/cifar10 --output shifts.png
    """
    from timm_selfconv.look.figures import check_ending, figure_shifts, save_figure

    check_ending(args.output)  # errors come before hours of work
    nets = {name: create_model(name).eval() for name in args.models}
    points: Dict[str, List[Dict[str, Any]]] = {name: [] for name in nets}
    for name, rows in points.items():
        for row in shift_points(nets[name], accuracy_on(args.data, args.split)):
            rows.append(row)
            print(json.dumps(dict(net=name, **row)), flush=True)
    save_figure(figure_shifts(points), args.output)
