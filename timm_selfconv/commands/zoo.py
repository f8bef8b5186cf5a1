"""The zoo's lists: list, tables, recipe. They read files, without torch."""
import json
from argparse import ArgumentParser, Namespace


def add_list(parser: ArgumentParser) -> None:
    parser.add_argument('--json', action='store_true', help='print JSON, with all that is known')


def run_list(args: Namespace) -> None:
    """Show the zoo: parameters, FLOPs, accuracy."""
    from timm_selfconv.measure import tables

    rows = tables.zoo_rows()
    print(json.dumps(rows, indent=2) if args.json else tables.format_zoo(rows))


def add_tables(parser: ArgumentParser) -> None:
    parser.add_argument('--time', action='store_true', help=(
        'measure the inference time of plain attention to hierarchical too, as a ratio (a minute)'))
    parser.add_argument('--json', action='store_true', help='print JSON, with all that is known')


def run_tables(args: Namespace) -> None:
    """Print the papers' tables as published beside what is measured here."""
    from timm_selfconv.measure import tables

    rows, results = tables.paper_tables(args.time), tables.results_rows()
    if args.json:
        print(json.dumps(dict(tables=rows, results=results), indent=2))
    else:
        print(f'{tables.format_tables(rows)}\n\nTest accuracies, published and here\n{tables.format_results(results)}')


def add_recipe(parser: ArgumentParser) -> None:
    parser.add_argument(
        'name', nargs='?', metavar='NAME', help='e.g. paper: train.py -c $(timm-selfconv recipe paper)')


def run_recipe(args: Namespace) -> None:
    """List the recipes, or print where the file of one lies."""
    from timm_selfconv.training.recipes import RECIPES, find_recipe

    if args.name:
        print(find_recipe(args.name))
        return
    for file in sorted(RECIPES.glob('*.yaml')):
        print(f'{file.stem:16}{file.read_text().splitlines()[0].lstrip("# ")}')
