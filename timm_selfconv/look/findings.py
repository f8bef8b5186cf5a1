"""Findings of both papers and the same measurements on the shipped weights."""
import functools
import itertools
import random
import statistics
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import timm
import torch
import torch.nn as nn
from PIL import Image
from tqdm import tqdm

from timm_selfconv.theory import degenerate_heads, to_shifts, with_shifts
from timm_selfconv.weights import measured_accuracy, weights_path
from timm_selfconv.weights.history import HISTORY, read_history
from .heads import LayerReport, report_heads

__all__ = ['FINDINGS', 'Finding', 'measure_findings', 'shift_points']

Accuracy = Callable[[nn.Module], float]  # of a net on test images of CIFAR-10
NARROW = 0.6  # spread in pixels of a narrow head
TOLERANCE = 0.0015  # of accuracies that are measured again, in bfloat16


@dataclass(frozen=True)
class Finding:
    """A row of the table."""
    claim: str  # of the paper (its figures and sections) or of the report
    answer: str  # whether the nets here agree: yes, partly or no
    words: str  # a sentence with {} in place of each number
    number: str  # the published number, or two with a comma between
    command: str  # shows it
    measure: Callable[..., str]  # measures the number again
    needs: str = 'files'  # argument of measure: 'pictures' of the demo, 'data' for an Accuracy, 'files' for none


@functools.cache
def net(name: str, untrained: bool = False) -> Any:
    """A net with its weights, or initialised with the seed of ``heads --untrained``."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(42)  # torch.manual_seed would also seed other devices, for good
        return timm.create_model(name, pretrained=not untrained).eval()


REPORTS: Dict[Tuple[str, bool], List[LayerReport]] = {}  # functools.cache cannot hash pictures


def reports(name: str, pictures: Sequence[Image.Image] = (), untrained: bool = False) -> List[LayerReport]:
    if (name, untrained) not in REPORTS:
        REPORTS[name, untrained] = report_heads(net(name, untrained), pictures)
    return REPORTS[name, untrained]


def share(flags: Sequence[bool]) -> str:
    return f'{sum(flags)} of {len(flags)}'


def fixed(name: str, untrained: bool = False) -> str:
    return share([n in x.kernel.fixed for x in reports(name, untrained=untrained) for n in range(len(x.heads))])


def ends(values: Sequence[Optional[float]], digits: int = 2) -> str:
    return f'{values[0]:.{digits}f} to {values[-1]:.{digits}f}'


def mean_ends(name: str, look: Callable[[Any], float], pictures: Sequence[Image.Image] = (), digits: int = 2) -> str:
    return ends([statistics.fmean(map(look, layer.heads)) for layer in reports(name, pictures)], digits)


def narrow(name: str) -> str:  # after one epoch
    rows = read_history(weights_path(name).with_suffix(f'.{HISTORY}'))['rows']
    heads = min(rows, key=lambda row: abs(row['epochs'] - 1))['heads']
    return share([rows + cols < 2 * NARROW ** 2 for layer in heads for _, _, rows, cols, _ in layer])


def learning(*names: str, epochs: int) -> str:
    histories = [read_history(weights_path(name).parent / 'curves' / f'{name}.42.{HISTORY}') for name in names]
    return ', '.join(f'{row["eval_top1"] / 100:.3f}' for x in histories for row in x['rows'] if row['epochs'] == epochs)


def accuracies(*names: str) -> str:
    return ', '.join(f'{measured_accuracy(f"{name}.cifar10"):.3f}' for name in names)


def shifted(accuracy: Accuracy, name: str, threshold: float) -> str:
    return ', '.join(f'{accuracy(x):.3f}' for x in (net(name), to_shifts(net(name), threshold)[0]))


LEARNED, QUADRATIC, CONTENT = 'sa_learned_cifar', 'sa_quadratic_cifar', 'sa_learned_content_cifar'
TINY_QUADRATIC, GENERAL, SIXTEEN = 'sa_quadratic_tiny_cifar', 'sa_quadratic_gen_cifar', 'sa_learned_h16_tiny_cifar'
HIERARCHICAL = 'sa_learned_content_hier_cifar'
PICTURES, ALL = f'heads {CONTENT} --images ...', 'findings --all hfds/uoft-cs/cifar10'

FINDINGS = [
    Finding('Attention learns to convolve (Fig. 5 to 7)', 'yes', '{} learned heads have a fixed offset',
            '36 of 54', f'heads {LEARNED}', lambda: fixed(LEARNED)),
    Finding('Quadratic attention does, too (Fig. 4)', 'yes', '{} heads have a fixed offset',
            '22 of 54', f'heads {QUADRATIC}', lambda: fixed(QUADRATIC)),
    Finding('They learn it in training', 'yes', '{} learned heads have one before training',
            '0 of 54', f'heads {LEARNED} --untrained', lambda: fixed(LEARNED, untrained=True)),
    Finding('Heads of a layer differ (Fig. 4)', 'yes', '{} of 36 learned fixed offsets are distinct',
            '36', f'heads {LEARNED}', lambda: str(sum(len(x.kernel.taps) for x in reports(LEARNED)))),
    Finding('Layers are K x K convolutions', 'partly', '{} learned heads are taps of 3 x 3 kernels',
            '16 of 54', f'heads {LEARNED}', lambda: share([h.acts_as_tap for x in reports(LEARNED) for h in x.heads])),
    Finding('Or generalised convolutions (Section 6)', 'yes', 'residual to their own taps: {} at most',
            '0.149', f'heads {LEARNED}', lambda: f'{max(x.kernel.residual or 0. for x in reports(LEARNED)):.3f}'),
    Finding('Shifts can replace heads', 'yes', 'accuracy {} becomes {} with 29 of 54, tiny net',
            '0.904, 0.900', ALL, lambda accuracy: shifted(accuracy, TINY_QUADRATIC, 0.2), 'data'),
    Finding('Shifts can replace all heads', 'partly', 'accuracy {} becomes {} with 54 of 54, tiny net',
            '0.904, 0.841', ALL, lambda accuracy: shifted(accuracy, TINY_QUADRATIC, 0.), 'data'),
    Finding('Heads maximise coverage', 'yes', 'attention that two heads share: {}, learned',
            '0.27 to 0.00', f'heads {LEARNED}', lambda: ends([x.overlap for x in reports(LEARNED)])),
    Finding('Later layers look farther', 'partly', 'farthest fixed offset: {} pixels, quadratic',
            '1.0 to 6.3', f'heads {QUADRATIC}', lambda: ends([x.kernel.reach for x in reports(QUADRATIC)], 1)),
    Finding('Heads narrow early in training (Fig. 3)', 'yes', '{} are narrow after one of 35 epochs',
            '36 of 54', f'figures {QUADRATIC} --run {QUADRATIC} --output figures', lambda: narrow(QUADRATIC)),
    Finding('Learned heads narrow early, too', 'yes', '{} are narrow after one of 51 epochs',
            '41 of 54', f'figures {LEARNED} --run {LEARNED} --output figures', lambda: narrow(LEARNED)),
    Finding('A ResNet learns faster (Fig. 2)', 'yes', 'accuracy {}, attention {}; tiny nets, 4 epochs',
            '0.677, 0.648', f'figures {TINY_QUADRATIC} --curves --output figures',
            lambda: learning('resnet_tiny_cifar', TINY_QUADRATIC, epochs=4)),
    Finding('Symmetry falls in high layers (version 1)', 'yes', 'symmetry up for down: {}, learned',
            '0.70 to 0.20', f'heads {LEARNED}', lambda: mean_ends(LEARNED, lambda head: head.symmetry[1])),
    Finding('Few heads are degenerate (appendix E)', 'yes', '{} of 54 look at all pixels alike, or at a stripe',
            '2', f'prune {GENERAL} --output pruned',
            lambda: str(sum(map(len, degenerate_heads(net(GENERAL)).values())))),
    Finding('General encoding learns taps (Fig. 12)', 'yes', '{} heads have a fixed offset',
            '34 of 54', f'heads {GENERAL}', lambda: fixed(GENERAL)),
    Finding('Sixteen heads act like nine (Fig. 14)', 'yes', '{} learned heads have a fixed offset, tiny',
            '65 of 96', f'heads {SIXTEEN}', lambda: fixed(SIXTEEN)),
    Finding('Content: some heads stay put (Fig. 8 to 10)', 'yes', '{} have one offset in ten pictures',
            '15 of 54', PICTURES, lambda own: share(
                [head.in_every_image for x in reports(CONTENT, own) for head in x.kernel.heads]), 'pictures'),
    Finding('Content: others follow the image', 'yes', 'attention that two pictures share: {}',
            '0.84 to 0.35', PICTURES, lambda own: mean_ends(CONTENT, lambda head: head.constancy, own), 'pictures'),
    Finding('Content: the first layers convolve', 'partly', '{} heads of layer 0 have a fixed offset',
            '3 of 9', PICTURES, lambda own: f'{len(reports(CONTENT, own)[0].kernel.fixed)} of 9', 'pictures'),
    Finding('Content: heads act alike at all queries', 'partly', 'attention two queries share: {}',
            '0.86 to 0.45', PICTURES, lambda own: mean_ends(CONTENT, lambda head: head.consistency, own), 'pictures'),
    Finding('Last hierarchical passes are not sparse', 'yes', 'entropy: {} nats, of at most 5.5',
            '5.4 to 4.8', f'heads {HIERARCHICAL} --images ...',
            lambda own: mean_ends(HIERARCHICAL, lambda head: head.entropy, own, digits=1), 'pictures'),
    Finding('Hierarchical attention is better', 'no', 'accuracy {}, plain {}; 42.6 and 53 epochs',
            '0.856, 0.926', 'list --tables', lambda: accuracies(HIERARCHICAL, CONTENT)),
    Finding('Hierarchical vision transformers are', 'no', 'accuracy {}, plain {}; tiny nets, 30 epochs',
            '0.858, 0.875', 'list --tables', lambda: accuracies('resvit_hier_tiny_cifar', 'resvit_tiny_cifar')),
    Finding('Hierarchical patchwise attention is', 'yes', 'accuracy {}, plain, 10 times as large, {}',
            '0.875, 0.866', 'list --tables', lambda: accuracies('san_patchwise_hier_cifar', 'san_patchwise_cifar')),
    Finding('Hierarchical pairwise attention is', 'no', 'accuracy {}, plain {}; 22.6 and 44 epochs',
            '0.815, 0.822', 'list --tables', lambda: accuracies('san_pairwise_hier_cifar', 'san_pairwise_cifar')),
]


def measure_findings(pictures: Sequence[Image.Image] = (), accuracy: Optional[Accuracy] = None) -> List[Dict[str, str]]:
    """Measure the findings again.

    Args:
        pictures: The ten pictures of ``timm-selfconv demo``, for nets that look at content.
        accuracy: Function for the accuracy of a net.

    Returns:
        Rows with claim, here (the published number in words), found (the number now), same ('yes' or 'no', accuracies
        within 0.0015), and a command that shows more. Findings that need a missing argument are left out.
    """
    given: Dict[str, Tuple[Any, ...]] = {'files': (), 'pictures': (pictures,), 'data': (accuracy,)}
    rows = []
    for finding in tqdm([x for x in FINDINGS if all(given[x.needs])], unit='finding', leave=False, disable=None):
        found = finding.measure(*given[finding.needs])
        same = found == finding.number or (finding.needs == 'data' and all(
            abs(float(a) - float(b)) < TOLERANCE for a, b in zip(found.split(', '), finding.number.split(', '))))
        rows.append(dict(claim=finding.claim, here=finding.words.format(*finding.number.split(', ')), found=found,
                         same='yes' if same else 'no', command=finding.command))
    return rows


def shift_points(
        model: nn.Module, accuracy: Accuracy, thresholds: Sequence[float] = (0.5, 0.2, 0.1, 0.05, 0.),
) -> Iterator[Dict[str, Any]]:
    """Measure accuracy against the number of heads that become shifts, without training.

    Args:
        model: A net with :class:`SelfAttention2d` layers that attend by position only.
        accuracy: Function for the accuracy of a net.
        thresholds: See :func:`timm_selfconv.theory.to_shifts`.

    Yields:
        For the net and for each threshold the number of heads, and three lists of accuracies: 'shifts', each head at
        its most attended offset; 'mean', the same heads at their rounded mean offsets; 'random', as many heads,
        drawn with seeds 0 and 1, at their most attended offsets, empty if all heads are shifts.
    """
    every = to_shifts(model, 0.)[1].shifts
    means = [[tuple(map(round, head.center)) for head in layer.heads] for layer in report_heads(model)]
    trained = [accuracy(model)]
    yield dict(heads=0, shifts=trained, mean=trained, random=2 * trained)
    for threshold in tqdm(thresholds, unit='threshold', leave=False, disable=None):
        own, total = to_shifts(model, threshold)[1].shifts, sum(map(len, every))
        count = sum(map(len, own))
        draws = [random.Random(seed).sample(range(total), count) for seed in (0, 1) if count < total]
        numbers = itertools.cycle(range(total))
        choices: Dict[str, List[Any]] = dict(
            shifts=[own], mean=[[[(n, means[layer][n]) for n, _ in heads] for layer, heads in enumerate(own)]],
            random=[[[head for head in heads if next(numbers) in draw] for heads in every] for draw in draws])
        yield dict(heads=count, **{
            kind: [accuracy(with_shifts(model, shifts)) for shifts in nets] for kind, nets in choices.items()})
