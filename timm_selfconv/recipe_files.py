"""Where the recipes lie: in ``recipes`` beside the package in a checkout, in it where it is installed."""
from pathlib import Path

__all__ = ['RECIPES', 'find_recipe']

PACKAGE = Path(__file__).resolve().parent
RECIPES = (PACKAGE if (PACKAGE / 'recipes').is_dir() else PACKAGE.parent) / 'recipes'


def find_recipe(name: str) -> Path:
    """The file of a recipe.

    Args:
        name: What it is called, without ``.yaml``.

    Raises:
        ValueError: If there is none of that name.
    """
    files = {file.stem: file for file in RECIPES.glob('*.yaml')}
    if name not in files:
        raise ValueError(f"recipe={name!r}: there is none; the package has {', '.join(sorted(files))}")
    return files[name]
