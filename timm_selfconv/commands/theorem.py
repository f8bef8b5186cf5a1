"""The theorem, live: theorem."""
from argparse import ArgumentParser, Namespace
from pathlib import Path

from timm_selfconv.files import check_new, write_new


def add_theorem(parser: ArgumentParser) -> None:
    parser.add_argument('image', nargs='?', metavar='IMAGE', help='a picture to convolve (default: a cat)')
    parser.add_argument('--output', required=True, metavar='FILE', help='the page, e.g. theorem.html')


def run_theorem(args: Namespace) -> None:
    """Write a page on which a convolution meets the attention heads that are it."""
    check_new(args.output)
    from timm_selfconv.data import open_images
    from timm_selfconv.look.theorem import theorem_page

    picture = open_images([args.image])[0] if args.image else None
    page = theorem_page(picture, Path(args.image or '').name).encode()
    write_new(args.output, page)
    print(f'{args.output}: {len(page) / 1e3:.0f} kB, open it in a browser')
