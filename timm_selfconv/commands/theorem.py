"""The theorem, live: theorem."""
from argparse import ArgumentParser, Namespace

from timm_selfconv.files import write_new
from ._shared import add_output, picture


def add_theorem(parser: ArgumentParser) -> None:
    parser.add_argument(
        'image', nargs='?', type=picture, metavar='IMAGE', help='a picture to convolve (default: a cat)')
    add_output(parser, 'FILE', 'the page, e.g. theorem.html')


def run_theorem(args: Namespace) -> None:
    """Write a page that shows a convolution and the attention heads that are it."""
    from timm_selfconv.data import open_images
    from timm_selfconv.look.theorem import theorem_page

    shown = open_images([args.image])[0] if args.image else None
    page = theorem_page(shown, args.image.name if args.image else '').encode()
    write_new(args.output, page)
    print(f'{args.output}: {len(page) / 1e3:.0f} kB, open it in a browser')
