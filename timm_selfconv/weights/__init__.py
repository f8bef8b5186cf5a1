"""The weights that ship, each with its model card; read here without torch. SHA256SUMS lists all of this version.

A tag says what weights are evidence of. ``cifar10``: trained from scratch, with labels only; their files go by the name
of the net. ``dist_cifar10``: had a teacher. ``from_quadratic_cifar10``: begun in another net. These go by ``name.tag``.
"""
import re
from pathlib import Path
from typing import Dict, List, Optional

from huggingface_hub import ModelCard

__all__ = [
    'LICENSE', 'WEIGHTS_DIR', 'card_facts', 'card_path', 'checksums', 'default_weights', 'measured_accuracy', 'origin',
    'provenance', 'shipped_names', 'teachers', 'weights_path',
]

WEIGHTS_DIR = Path(__file__).resolve().parent
LICENSE = 'apache-2.0'


def weights_path(name: str) -> Path:
    """Where weights lie if they ship with the package.

    Args:
        name: Registered name of a net, for its weights from scratch (tag ``cifar10``), or ``name.tag`` for others.
    """
    return WEIGHTS_DIR / f"{name.removesuffix('.cifar10')}.safetensors"


def card_path(name: str) -> Path:
    """Where the model card of weights lies if they ship, see :func:`weights_path`, or of a net in a ``local-dir:``."""
    if name.startswith('local-dir:'):
        return Path(name.removeprefix('local-dir:'), 'README.md')
    return weights_path(name).with_suffix('.md')


def checksums() -> Dict[str, str]:
    """SHA-256 of all weight files of this version, in the package or on the Hub, by name."""
    file = WEIGHTS_DIR / 'SHA256SUMS'
    lines = file.read_text().splitlines() if file.is_file() else []
    return {Path(file).stem: checksum for checksum, file in (line.split() for line in lines)}


def shipped_names() -> List[str]:
    """Names of all weights of this version, in the package or on the Hub, as :func:`weights_path` takes them."""
    return sorted(checksums())


def default_weights(name: str) -> str:
    """Name of the weights that ``pretrained=True`` loads, as :func:`weights_path` takes it.

    Args:
        name: Registered name of a net, for the most accurate of its weights, or ``name.tag``.

    Returns:
        The name itself if none ship.
    """
    tagged = [n for n in shipped_names() if n.partition('.')[0] == name] or [name.removesuffix('.cifar10')]
    if len(tagged) == 1:  # cards take time to read, and this runs for every net when the package is imported
        return tagged[0]
    return max(tagged, key=lambda shipped: measured_accuracy(shipped) or 0.)


def measured_accuracy(name: str) -> Optional[float]:
    """CIFAR-10 test accuracy that the model card of shipped weights states.

    Args:
        name: Name of the weights, see :func:`weights_path`.

    Returns:
        Accuracy between 0 and 1, or None if no card ships.
    """
    if not card_path(name).is_file():
        return None
    results = ModelCard.load(card_path(name)).data.eval_results or []
    return next((float(r.metric_value) for r in results if r.metric_type == 'accuracy'), None)


def card_facts(name: str) -> Dict[str, str]:
    """How shipped weights came about: the table of their model card.

    Args:
        name: Name of the weights, see :func:`weights_path`.

    Returns:
        Facts such as recipe, epochs, seed, hardware and time, as the card words them; empty if no card ships.
    """
    if not card_path(name).is_file():
        return {}
    return dict(re.findall(r'^\| (\w[^|]*?) \| (.*) \|$', card_path(name).read_text(), re.MULTILINE))


def named_net(name: str, fact: str) -> Optional[str]:
    """The net that a fact of a model card begins with; None if the card says none or nothing."""
    net = card_facts(name).get(fact, 'none').split()[0].rstrip(',')
    return None if net == 'none' else net


def origin(name: str) -> Optional[str]:
    """Name of the weights that shipped weights were begun in, None for those from scratch."""
    return named_net(name, 'initialised from')


def teachers(name: str) -> List[str]:
    """Nets that shipped weights learned from besides labels, first those of the weights that they were begun in."""
    begun, teacher = origin(name), named_net(name, 'teacher')
    return list(dict.fromkeys([*(teachers(begun) if begun else []), *([teacher] if teacher else [])]))


def provenance(name: str) -> str:
    """What shipped weights learned from, in a phrase: teacher and origin, or that there were none.

    Args:
        name: Name of the weights, see :func:`weights_path`.
    """
    begun, taught = origin(name), teachers(name)
    told = [f'begun in {begun}'] if begun else []
    told += [f'taught by {", ".join(taught)}'] if taught else []
    return ', '.join(told) or 'from scratch, labels only'
