"""The findings of both papers, what the shipped weights say of each, and how to measure it again."""
import functools
import statistics
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence

import timm
import torch
import torch.nn as nn
from PIL import Image
from tqdm import tqdm

from timm_selfconv.theory import degenerate_heads, to_shifts
from timm_selfconv.weights import measured_accuracy, weights_path
from timm_selfconv.weights.history import HISTORY, find_history, read_history
from .heads import LayerReport, report_heads

__all__ = ['FINDINGS', 'Finding', 'findings_table', 'measure_findings']

Accuracy = Callable[[nn.Module, str], float]  # of a net on a split of CIFAR-10
NARROW = 0.6  # spread in pixels of a head that has narrowed


@dataclass(frozen=True)
class Finding:
    """A row of the table.

    Attributes:
        claim: A claim of the paper (figures and sections are its own) or of the report.
        answer: Whether the nets here agree: yes, partly or no.
        ours: The result in one sentence, with the meaning of the number.
        number: The number as published here.
        command: Command that shows it.
        measure: Measures it again, from pictures and a function for accuracies where it needs them.
        needs: 'files' that ship, 'pictures' (the ten of the demo) or 'data' (CIFAR-10's test split).
    """
    claim: str
    answer: str
    ours: str
    number: str
    command: str
    measure: Callable[..., str]
    needs: str = 'files'


@functools.cache
def net(name: str, untrained: bool = False) -> Any:
    """A net with its weights, or as initialised with the seed of ``heads --untrained``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)
        return timm.create_model(name, pretrained=not untrained).eval()


REPORTS: Dict[Any, List[LayerReport]] = {}  # pictures are no keys of a cache


def reports(name: str, untrained: bool = False, pictures: Sequence[Image.Image] = ()) -> List[LayerReport]:
    """Reports on the heads of a net, made once."""
    if (name, untrained) not in REPORTS:
        REPORTS[name, untrained] = report_heads(net(name, untrained), pictures)
    return REPORTS[name, untrained]


def share(flags: Sequence[bool]) -> str:
    return f'{sum(flags)} of {len(flags)}'


def fixed(name: str, untrained: bool = False) -> str:
    return share([n in x.kernel.fixed for x in reports(name, untrained) for n in range(len(x.heads))])


def distinct(name: str) -> str:
    return share([n < len(x.kernel.taps) for x in reports(name) for n in range(len(x.kernel.fixed))])


def taps(name: str) -> str:
    return share([head.acts_as_tap for layer in reports(name) for head in layer.heads])


def unmoved(layers: List[LayerReport]) -> str:
    return share([head.in_every_image for layer in layers for head in layer.kernel.heads])


def ends(values: Sequence[Optional[float]], digits: int = 2) -> str:
    """The first and the last of a number for each layer."""
    return f'{values[0]:.{digits}f} to {values[-1]:.{digits}f}'


def mean_of(layer: LayerReport, name: str) -> float:
    return statistics.fmean(getattr(head, name) for head in layer.heads)


def narrow(name: str, epochs: int) -> str:
    """Heads that were narrow after so many epochs, by the history of the training."""
    path = find_history(name)
    assert path is not None, name
    heads = min(read_history(path)['rows'], key=lambda row: abs(row['epochs'] - epochs))['heads']
    return share([rows + cols < 2 * NARROW ** 2 for layer in heads for _, _, rows, cols, _ in layer])


def learning(*names: str, epochs: int) -> str:
    """Accuracies after so many epochs of nets that the same recipe trained, on images held out, seed 42."""
    histories = [read_history(weights_path(name).parent / 'curves' / f'{name}.42.{HISTORY}') for name in names]
    return ', '.join(f'{row["eval_top1"] / 100:.3f}' for x in histories for row in x['rows'] if row['epochs'] == epochs)


def degenerate(name: str) -> str:
    return f'{sum(map(len, degenerate_heads(net(name)).values()))} of {sum(net(name).num_heads)}'


def accuracies(*names: str) -> str:
    return ', '.join(f'{measured_accuracy(f"{name}.cifar10"):.3f}' for name in names)


def shifted(name: str, split: str, threshold: float) -> Callable[..., str]:
    """Accuracies of a net and of the same with shifts, without training."""
    def measure(pictures: Any, accuracy: Accuracy) -> str:
        nets = net(name), to_shifts(net(name), threshold)[0]
        return ', '.join(f'{accuracy(x, split):.3f}' for x in nets)
    return measure


def content(look: Callable[[List[LayerReport]], str], name: str = 'sa_learned_content_cifar') -> Callable[..., str]:
    return lambda pictures, accuracy: look(reports(name, pictures=pictures))


def files(look: Callable[..., str], *args: Any, **kwargs: Any) -> Callable[..., str]:
    return lambda pictures, accuracy: look(*args, **kwargs)


LEARNED, QUADRATIC, CONTENT, TINY = 'sa_learned_cifar', 'sa_quadratic_cifar', 'sa_learned_content_cifar', '_tiny_cifar'
PICTURES, ALL = f'heads {CONTENT} --images ...', 'findings --all hfds/uoft-cs/cifar10'
HIER, PLAIN = f'sa_learned_content_hier{TINY}', f'sa_learned_content{TINY}'

FINDINGS = [
    Finding('Attention learns to convolve (Fig. 5 to 7)', 'yes',
            'Heads have a fixed offset (learned encoding).',
            '36 of 54', f'heads {LEARNED}', files(fixed, LEARNED)),
    Finding('The same, quadratic encoding (Fig. 4)', 'yes',
            'Heads have a fixed offset.',
            '22 of 54', f'heads {QUADRATIC}', files(fixed, QUADRATIC)),
    Finding('Training finds these offsets', 'yes', 'No head has a fixed offset before training.',
            '0 of 54', f'heads {LEARNED} --untrained', files(fixed, LEARNED, True)),
    Finding('Heads attend to different pixels (Fig. 4)', 'yes', 'The fixed offsets of a layer are all different.',
            '36 of 36', f'heads {LEARNED}', files(distinct, LEARNED)),
    Finding('A layer expresses a K x K convolution (Theorem 1)', 'partly', 'Some heads are taps of a 3 x 3 kernel.',
            '16 of 54', f'heads {LEARNED}', files(taps, LEARNED)),
    Finding('Layers express a generalised convolution (Section 6)', 'yes',
            'Residuals to the fixed offsets are at most this.',
            '0.149', f'heads {LEARNED}',
            files(lambda: f'{max(x.kernel.residual or 0. for x in reports(LEARNED)):.3f}')),
    Finding('Trained attention is such a convolution', 'yes',
            'Accuracy drops a little with 29 of 54 heads as shifts (tiny net).',
            '0.904, 0.900', ALL, shifted(f'sa_quadratic{TINY}', 'test', 0.2), 'data'),
    Finding('The same, without any attention', 'partly', 'Accuracy drops more with all heads as shifts.',
            '0.904, 0.841', ALL, shifted(f'sa_quadratic{TINY}', 'test', 0.), 'data'),
    Finding('Heads maximise coverage', 'yes', 'Heads overlap less in later layers.',
            '0.27 to 0.00', f'heads {LEARNED}', files(lambda: ends([x.overlap for x in reports(LEARNED)]))),
    Finding('Layers 1 and 2 are local, later ones look far', 'partly',
            'Fixed offsets reach farther (pixels), but most layers have wide heads.',
            '1.0 to 6.3', f'heads {QUADRATIC}', files(lambda: ends([x.kernel.reach for x in reports(QUADRATIC)], 1))),
    Finding('Heads narrow early (Fig. 3)', 'yes', 'Spreads are below 0.6 pixels after one of 35 epochs.',
            '36 of 54', f'figures {QUADRATIC} --run {QUADRATIC} --output figures', files(narrow, QUADRATIC, 1)),
    Finding('The same, learned encoding', 'yes', 'Spreads are below 0.6 pixels after one of 51 epochs.',
            '41 of 54', f'figures {LEARNED} --run {LEARNED} --output figures', files(narrow, LEARNED, 1)),
    Finding('A ResNet learns faster (Fig. 2)', 'yes',
            'The tiny ResNet leads after four epochs; later the gap closes.',
            '0.677, 0.648', f'figures sa_quadratic{TINY} --curves --output figures',
            files(learning, f'resnet{TINY}', f'sa_quadratic{TINY}', epochs=4)),
    Finding('High layers are less symmetric vertically (version 1)', 'yes',
            'Patterns mirror up and down less in later layers.',
            '0.70 to 0.20', f'heads {LEARNED}',
            files(lambda: ends([statistics.fmean(h.symmetry[1] for h in x.heads) for x in reports(LEARNED)]))),
    Finding('Few heads are degenerate (appendix E)', 'yes', 'Heads are flat or a stripe.',
            '1 of 54', f'prune {QUADRATIC} --output pruned', files(degenerate, QUADRATIC)),
    Finding('General quadratic heads also convolve (Fig. 12)', 'yes', 'Heads of the tiny net have a fixed offset.',
            '32 of 54', f'heads sa_quadratic_gen{TINY}', files(fixed, f'sa_quadratic_gen{TINY}')),
    Finding('Nets with 16 heads also convolve (Fig. 14)', 'yes', 'Heads of the tiny learned net have a fixed offset.',
            '65 of 96', f'heads sa_learned_h16{TINY}', files(fixed, f'sa_learned_h16{TINY}')),
    Finding('With content, some heads stay put (Fig. 8 to 10)', 'yes',
            'Heads prefer one offset in ten pictures.',
            '15 of 54', PICTURES, content(unmoved), 'pictures'),
    Finding('Other heads follow the image, more in later layers', 'yes',
            'Two pictures share less attention in later layers.',
            '0.84 to 0.35', PICTURES, content(lambda layers: ends([mean_of(x, 'constancy') for x in layers])),
            'pictures'),
    Finding('With content, first layers convolve', 'partly', 'Some heads of layer 0 have a fixed offset.',
            '3 of 9', PICTURES, content(lambda layers: f'{len(layers[0].kernel.fixed)} of 9'), 'pictures'),
    Finding('Attention forms the translation group', 'partly',
            'With content, two queries share less attention in later layers.',
            '0.86 to 0.45', PICTURES, content(lambda layers: ends([mean_of(x, 'consistency') for x in layers])),
            'pictures'),
    Finding('Hierarchical attention ends without sparsity (report)', 'yes',
            'Entropy stays high (nats, at most 4.2).',
            '3.6 to 3.5', f'heads {HIER} --images ...',
            content(lambda layers: ends([mean_of(x, 'entropy') for x in layers], 1), HIER), 'pictures'),
    Finding('Hierarchical attention is better (report)', 'no', 'The plain net wins (tiny, 20 epochs).',
            '0.746, 0.846', 'list --tables', files(accuracies, HIER, PLAIN)),
    Finding('The same, vision transformers', 'no', 'The plain net wins (tiny, 30 epochs).',
            '0.858, 0.875', 'list --tables', files(accuracies, f'resvit_hier{TINY}', f'resvit{TINY}')),
    Finding('The same, patchwise vector attention', 'yes', 'The hierarchical net wins with a tenth of the parameters.',
            '0.875, 0.866', 'list --tables', files(accuracies, 'san_patchwise_hier_cifar', 'san_patchwise_cifar')),
    Finding('The same, pairwise', 'no', 'The plain net wins (44 epochs against 22.6).',
            '0.815, 0.822', 'list --tables', files(accuracies, 'san_pairwise_hier_cifar', 'san_pairwise_cifar')),
]


def findings_table() -> str:
    """The table of the theory chapter, in Markdown: a finding is a row."""
    rows = [(x.claim, x.ours, x.answer, x.number, f'`{x.command}`') for x in FINDINGS]
    head = [('claim', 'result', 'agrees', 'number', 'command'), ('---',) * 5]
    return '\n'.join(f'| {" | ".join(row)} |' for row in [*head, *rows])


def measure_findings(
        pictures: Sequence[Image.Image] = (),
        accuracy: Optional[Accuracy] = None,
) -> List[Dict[str, str]]:
    """Measure the findings again.

    Args:
        pictures: The ten pictures of ``timm-selfconv demo``, for nets that look at content.
        accuracy: Accuracy of a net on a split of CIFAR-10 such as 'test[:2000]'.

    Returns:
        Rows with claim, number claimed, number found, and 'yes' or 'no' for whether they are the same. Findings that
        need pictures or accuracies are left out where these are not given.
    """
    given = {'files', *(['pictures'] if pictures else []), *(['data'] if accuracy else [])}
    rows = []
    for finding in tqdm(FINDINGS, unit='finding', leave=False, disable=None):
        if finding.needs in given:
            found = finding.measure(pictures, accuracy)
            rows.append(dict(
                claim=finding.claim, here=finding.ours, claimed=finding.number, found=found,
                same='yes' if found == finding.number else 'no'))
    return rows
