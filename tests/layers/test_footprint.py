import pytest
import torch
import torch.nn.functional as F

from timm_selfconv.layers.footprint import aggregate, footprint
from tiny_nets import noise


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_footprints_and_their_sums_keep_their_dtype_under_autocast(dtype):
    x, weights = noise(2, 4, 5, 6).to(dtype), noise(2, 9, 2, 5, 6).to(dtype)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        found = *footprint(x, 3), aggregate(x, weights, 3)
    with torch.no_grad():
        wanted = *footprint(x, 3), aggregate(x, weights, 3)
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(found, wanted))


@pytest.mark.parametrize('kernel_size,stride,dilation', [(3, 1, 2), (5, 2, 1), (1, 3, 1)])
def test_aggregation_against_torch_unfold_and_its_gradients(kernel_size, stride, dilation):
    value = noise(3, 6, 7, 6).requires_grad_()
    rows, cols = -(-7 // stride), -(-6 // stride)
    weights = noise(3, kernel_size ** 2, 3, rows, cols).requires_grad_()
    sizes = kernel_size, stride, dilation
    padded = F.pad(value, (dilation * (kernel_size // 2),) * 4, mode='reflect')
    unfolded = F.unfold(padded, kernel_size, dilation, 0, stride).view(3, 2, 3, kernel_size ** 2, rows, cols)
    wanted = torch.einsum('bsmnhw,bnmhw->bsmhw', unfolded, weights).flatten(1, 2)
    torch.testing.assert_close(aggregate(value, weights, *sizes), wanted)
    grad = torch.randn_like(wanted)
    ours, theirs = (torch.autograd.grad(out, (value, weights), grad, retain_graph=True)
                    for out in (aggregate(value, weights, *sizes), wanted))
    torch.testing.assert_close(ours, theirs)


def test_derivatives_of_aggregation():
    value, weights = noise(1, 2, 2, 2).requires_grad_(), noise(1, 9, 1, 2, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda v, w: aggregate(v, w, 3), (value, weights))
    assert torch.autograd.gradgradcheck(lambda v, w: aggregate(v, w, 3), (value, weights))
    with pytest.raises(ValueError, match=r'\[1, 2, 2, 2\]: needs a height and width of at least 4'):
        aggregate(value, weights, 3, dilation=3)
