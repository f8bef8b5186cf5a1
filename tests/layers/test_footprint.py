import pytest
import torch
import torch.nn.functional as F

from timm_selfconv.layers.footprint import aggregate, footprint
from tiny_nets import noise


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_footprints_and_their_sums_keep_their_dtype_under_autocast(dtype):
    x, weights = noise(2, 4, 5, 6, dtype=dtype), noise(2, 9, 2, 5, 6, dtype=dtype)
    wanted = *footprint(x, 3), aggregate(x, weights, 3)
    with torch.autocast('cpu', torch.bfloat16):
        found = *footprint(x, 3), aggregate(x, weights, 3)
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(found, wanted))


@pytest.mark.parametrize('kernel_size', [1, 3, 5])
def test_aggregation_against_torch_unfold_and_its_gradients(kernel_size):
    value, weights = noise(3, 6, 7, 6).requires_grad_(), noise(3, kernel_size ** 2, 3, 7, 6).requires_grad_()
    padded = F.pad(value, (kernel_size // 2,) * 4, mode='reflect')
    unfolded = F.unfold(padded, kernel_size).view(3, 2, 3, kernel_size ** 2, 7, 6)
    wanted = torch.einsum('bsmnhw,bnmhw->bsmhw', unfolded, weights).flatten(1, 2)
    out = aggregate(value, weights, kernel_size)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), (value, weights)) for o in (out, wanted)))


def test_images_too_small_to_reflect_are_refused():
    with pytest.raises(ValueError, match=r'\[1, 2, 2, 3\]: needs a height and width of at least 3'):
        footprint(noise(1, 2, 2, 3), 5)
