"""A net's page on the Hub: all of it is of the same weights."""
import safetensors.torch
import torch
from PIL import Image

from timm_selfconv.look import repository


def test_a_page_draws_the_weights_that_it_holds_where_a_net_has_two_files(tmp_path, monkeypatch):
    drawn = []

    def draw(model, *_):
        drawn.append(model)
        raise ValueError('nothing to draw')

    monkeypatch.setattr(repository, 'draw_figures', draw)
    repository.write_repository('sa_learned_cifar', tmp_path, {'red': Image.new('RGB', (32, 32), 'red')})
    held = safetensors.torch.load_file(tmp_path / 'model.safetensors')
    for name, value in drawn[0].state_dict().items():
        torch.testing.assert_close(value.half(), held[name].half(), rtol=0, atol=0)
