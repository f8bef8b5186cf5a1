"""Helpers for tests of figures and pages: small nets, histories, and readers of drawn text and pictures."""
from urllib.request import urlopen

import numpy as np
import timm
import torch
from PIL import Image

from timm_selfconv.theory import position_blobs
from timm_selfconv.weights.history import write_history

SMALL = dict(embed_dim=8, mlp_dim=8, depth=2)
PAINTED = '() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))'  # two frames of a page


def until(condition):
    """Wait for a condition in a page. playwright's own waits need eval, which the pages forbid."""
    return f'new Promise(done => {{ (function look() {{ {condition} ? done() : requestAnimationFrame(look); }})(); }})'


def middle(locator, row=0.5, col=0.5):
    """Return the place on the screen of a place in an element, in parts of its height and width."""
    box = locator.bounding_box()
    return box['x'] + box['width'] * col, box['y'] + box['height'] * row


AT_REST = """() => new Promise(done => {
    let last = NaN, alike = 0;
    const look = () => {
        [alike, last] = [scrollY === last ? alike + 1 : 0, scrollY];
        if (alike < 10) requestAnimationFrame(look); else done();
    };
    look();
})"""


def swipe(page, x, y, dy):
    """Move a finger on a page and wait until it no longer scrolls."""
    finger = page.context.new_cdp_session(page)
    finger.send('Input.dispatchTouchEvent', dict(type='touchStart', touchPoints=[dict(x=x, y=y)]))
    for i in range(1, 11):
        finger.send('Input.dispatchTouchEvent', dict(type='touchMove', touchPoints=[dict(x=x, y=y + dy * i / 10)]))
    finger.send('Input.dispatchTouchEvent', dict(type='touchEnd', touchPoints=[]))
    page.evaluate(AT_REST)


def write_run(folder, net, grid, epochs, change=lambda: None, name='sa_quadratic_cifar'):
    """Write a history of a net that changes after each epoch, and return the Gaussians of the epochs."""
    rows, blobs = [], {}
    for epoch in epochs:
        blobs[epoch] = position_blobs(net, grid)
        heads = [[[*center, cov[0][0], cov[1][1], cov[0][1]] for center, cov in zip(
            layer.centers.tolist(), layer.covariances.tolist())] for layer in blobs[epoch]]
        rows.append(dict(epochs=epoch, heads=heads, train_loss=9 / max(epoch, 1)))
        change()
    rows[-1]['eval_top1'] = 90.
    write_history(folder / 'history.json', name, list(grid), rows)
    return blobs


def panels(figure):
    """Images in a figure, in drawing order, without colour bars."""
    return [np.asarray(image.get_array()) for ax in figure.axes for image in ax.images]


def assert_drawn(images, expected):
    """Check that the images in a figure equal the expected ones up to rounding."""
    for image, wanted in zip(images, expected, strict=True):
        np.testing.assert_allclose(image, wanted, rtol=1e-4, atol=1e-6)


def texts(drawn):
    """Texts of a figure or of its axes."""
    return [t.get_text() for t in drawn.texts]


def decode(uri):
    """Return the picture in an address that begins with ``data:``, shape (height, width, 3), in bytes."""
    return np.array(Image.open(urlopen(uri)).convert('RGB'))


def set_heads(block, centers, spreads):
    """Set the centres and spreads of a layer with a quadratic encoding."""
    for parameter, values in ((block.attn.encoding.centers, centers), (block.attn.encoding.spreads, spreads)):
        parameter.data.copy_(torch.as_tensor(values))


def quadratic_net():
    net = timm.create_model('sa_quadratic_cifar', num_heads=2, **SMALL)
    for block in net.blocks:
        set_heads(block, [[1., -2.], [3., 0.5]], [0.5, -2.])
    return net
