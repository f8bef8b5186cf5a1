"""What there is: list, tables."""
import argparse
import json

from timm_selfconv.measure import tables


def run_list(args: argparse.Namespace) -> None:
    rows = tables.zoo_rows()
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print(tables.format_zoo(rows, wide=args.wide))
    print(f'\n{tables.MARKS}')


def run_tables(args: argparse.Namespace) -> None:
    rows, results = tables.paper_tables(args.time), tables.results_rows()
    if args.json:
        print(json.dumps(dict(tables=rows, results=results), indent=2))
    else:
        print(tables.format_tables(rows, args.wide))
        print(f'\nTest accuracies, published and here\n{tables.format_results(results, wide=args.wide)}')
