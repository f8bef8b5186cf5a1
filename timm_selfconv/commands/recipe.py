"""Where a recipe lies."""
import argparse

from timm_selfconv.training.recipes import find_recipe


def run_recipe(args: argparse.Namespace) -> None:
    print(find_recipe(args.name))
