"""A net's page on the Hub: its weights, configuration and card, its figures and its explorer."""
from pathlib import Path
from typing import Mapping, Sequence, Union

import timm
import torch
from PIL import Image

from timm_selfconv.data import preprocess
from timm_selfconv.weights import card_path, measured_accuracy, provenance, tagged_name
from timm_selfconv.weights.loading import OWNER, WEIGHTS_FILE, read_weights
from timm_selfconv.weights.saving import write_net
from .explorer import explorer_page
from .figures import draw_figures, save_figures

__all__ = ['write_repository']

CITATION = """
## Citation

```bibtex
@inproceedings{cordonnier2020relationship,
  title     = {On the Relationship between Self-Attention and Convolutional Layers},
  author    = {Cordonnier, Jean-Baptiste and Loukas, Andreas and Jaggi, Martin},
  booktitle = {International Conference on Learning Representations},
  year      = {2020}
}
```
"""

RELATIVES = """
## Relatives

| net | test accuracy | learned from |
|---|---|---|
"""


def write_repository(
        name: str,
        folder: Union[str, Path],
        pictures: Mapping[str, Image.Image],
        relatives: Sequence[str] = (),
) -> None:
    """Write all that a net's repository on the Hub holds.

    Args:
        name: A net whose weights ship.
        folder: An empty folder, or one to be made.
        pictures: What the explorer shows, by name.
        relatives: Other nets to link to.
    """
    folder = Path(folder)
    model = timm.create_model(tagged_name(name), pretrained=True).eval()
    write_net(model, folder, pretrained_cfg=dict(hf_hub_id=f'{OWNER}/{name}'))
    (folder / WEIGHTS_FILE).write_bytes(read_weights(name))  # the shipped bytes, float16
    shown = ''
    with torch.inference_mode():
        images = preprocess(model, list(pictures.values()))
        try:
            figures = draw_figures(model, images, list(pictures))
            page = explorer_page({name: model}, pictures, runs=[name])
        except ValueError:  # a convolutional net has no attention to draw
            pass
        else:
            files = save_figures(figures, folder / 'figures')
            shown = ''.join(f'![{file.stem}](figures/{file.name})\n\n' for file in files)
            shown += '`explorer.html` shows where every pixel looks: download it and open it in a browser.\n'
            (folder / 'explorer.html').write_bytes(page.encode())
    links = '\n'.join(
        f'| [{other}](https://huggingface.co/{OWNER}/{other}) | {measured_accuracy(other):.4f} | {provenance(other)} |'
        for other in relatives)
    card = card_path(name).read_text()
    (folder / 'README.md').write_text('\n'.join(part for part in (
        card, f'## What it sees\n\n{shown}' if shown else '', RELATIVES + links + '\n' if links else '', CITATION,
    ) if part))
