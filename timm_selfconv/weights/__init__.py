"""Trained weights with model cards and histories.

- ``NAME.safetensors``, ``NAME.md``, ``NAME.history.json``: shipped weights, card and history.
- ``SHA256SUMS``: checksums of all weights of this version, in the package or on the Hub.
- ``curves/NET.SEED.history.json``: histories of recipes/curves.yaml, without weights.
- this file: names and cards. history: the history of a run.
- loading: files of the package or the Hub. saving: weight files, folders, cards. publishing: repositories on the Hub.

Weights with the tag ``cifar10`` were trained with labels only, and ``pretrained=True`` loads them. The two files with
the tags ``dist_cifar10`` and ``from_quadratic_cifar10`` had a teacher.
"""
import re
from pathlib import Path
from typing import Dict, List, Optional

__all__ = [
    'LICENSE', 'WEIGHTS_DIR', 'card_facts', 'card_path', 'checksums', 'measured_accuracy', 'net_caption', 'origin',
    'provenance', 'tagged_name', 'teachers', 'weights_path',
]

WEIGHTS_DIR = Path(__file__).resolve().parent
LICENSE = 'apache-2.0'


def weights_path(name: str) -> Path:
    """Path of shipped weights. A name without a tag has the tag ``cifar10``."""
    return WEIGHTS_DIR / f"{name.removesuffix('.cifar10')}.safetensors"


def tagged_name(name: str) -> str:
    """Return a name with its tag, for timm.create_model."""
    return name if '.' in name else f'{name}.cifar10'


def card_path(name: str) -> Path:
    """Path of the model card of shipped weights, see :func:`weights_path`, or of a ``local-dir:``."""
    if name.startswith('local-dir:'):
        return Path(name.removeprefix('local-dir:'), 'README.md')
    return weights_path(name).with_suffix('.md')


def read_sums(sums: Path) -> Dict[str, str]:
    lines = sums.read_text().splitlines() if sums.is_file() else []
    return {file: checksum for checksum, file in map(str.split, lines)}


def checksums() -> Dict[str, str]:
    """SHA-256 of all weights of this version, in the package or on the Hub, by sorted name."""
    return dict(sorted((Path(file).stem, checksum) for file, checksum in read_sums(WEIGHTS_DIR / 'SHA256SUMS').items()))


def measured_accuracy(name: str) -> Optional[float]:
    """CIFAR-10 test accuracy on the card of shipped weights, from 0 to 1; None if the card has no such row."""
    stated = re.match(r'([\d.]+) .* of the CIFAR-10 test split', card_facts(name).get('test accuracy', ''))
    return float(stated[1]) if stated else None


def card_facts(name: str) -> Dict[str, str]:
    """Rows of a model card (recipe, epochs, seed, time, ...); empty without a card."""
    if not card_path(name).is_file():
        return {}
    text = card_path(name).read_text()
    arguments = [('arguments', words) for words in re.findall('```text\n(.*?)\n```', text, re.DOTALL)]
    return dict(re.findall(r'^\| (\w[^|]*?) \| (.*) \|$', text, re.MULTILINE) + arguments)


def named_net(facts: Dict[str, str], fact: str) -> Optional[str]:
    net = facts.get(fact, '').partition(' ')[0].rstrip(',')
    return None if net in ('', 'none') else net


def origin(name: str) -> Optional[str]:
    """Name of the weights that shipped weights started from; None for training from scratch."""
    return named_net(card_facts(name), 'initialised from')


def teachers(name: str) -> List[str]:
    """Teachers of shipped weights, after the teachers of the weights that they started from."""
    begun, teacher = origin(name), named_net(card_facts(name), 'teacher')
    return list(dict.fromkeys([*(teachers(begun) if begun else []), *([teacher] if teacher else [])]))


def provenance(name: str) -> str:
    """Describe teacher and origin of weights."""
    if 'teacher' not in card_facts(name):
        there_are = ':' in name or name.removesuffix('.cifar10') in checksums()
        return 'teacher and origin unknown' if there_are else 'no weights'
    begun, taught = origin(name), ', '.join(teachers(name))
    helped = 'teacher unknown' if taught == 'unknown' else f'taught by {taught}' if taught else 'labels only'
    return f"{f'begun in {begun}' if begun else 'from scratch'}, {helped}"


def net_caption(name: str, checkpoint: Optional[str] = None, untrained: bool = False) -> str:
    """Describe weights by their card: teacher, origin, epochs and accuracy.

    ``name`` is registered, with or without a tag, or ``local-dir:`` or ``hf-hub:``. ``checkpoint`` is a file or folder
    of other weights.
    """
    if untrained:
        return 'untrained'
    facts = {} if checkpoint else card_facts(name)
    if 'teacher' not in facts:  # no card, or a card of another project
        source = checkpoint or name.partition(':')[2]
        return f'weights of {Path(source).absolute().name}' if source else 'its own weights'
    told, epochs = [provenance(name)], facts.get('epochs')
    if epochs:
        told.append(f"{epochs} epoch{'' if epochs == '1' else 's'}")
    tested, validated = measured_accuracy(name), re.match(r'[01]\.\d+', facts.get('validation accuracy', ''))
    if tested is not None:
        told.append(f'test accuracy {100 * tested:.1f} %')
    elif validated:  # the folder of a run
        told.append(f'validation accuracy {100 * float(validated[0]):.1f} %')
    return ', '.join(told)
