"""A line on a net: where its weights are from, what they learned from and how good they are."""
from pathlib import Path
from typing import Optional

from timm_selfconv.weights import card_facts, default_weights, measured_accuracy, provenance

__all__ = ['net_caption']


def net_caption(name: str, checkpoint: Optional[str] = None, untrained: bool = False) -> str:
    """Where a net's weights are from, with their teacher and origin, and the accuracy that their card states.

    Args:
        name: Its registered name, with a tag or without, or a folder's or the Hub's (``local-dir:``, ``hf-hub:``).
        checkpoint: File or folder of its weights, if they are not its own.
        untrained: It has none.
    """
    if untrained:
        return 'untrained'
    if checkpoint is not None:
        return f'weights of {Path(checkpoint).name}'
    weights = default_weights(name)
    accuracy, epochs = measured_accuracy(weights), card_facts(weights).get('epochs')
    if accuracy is None:
        return 'its own weights'
    trained = f'{epochs} epoch{"" if epochs == "1" else "s"}, ' if epochs else ''
    return f"{provenance(weights)}, {trained}{100 * accuracy:.1f} % of CIFAR-10's test images right"
