"""Derive the arguments of timm's train.py, which the recipes are checked against.

    python tests/train_arguments.py path/to/train.py > tests/train_arguments.json

The script is read, not run. For each argument, by the name that a recipe uses: `type` (what one value must be), `list`
(whether it takes several) and `choices`.
"""
import ast
import json
import sys
from pathlib import Path
from typing import Any, Dict


def keyword(call: ast.Call, name: str) -> Any:
    """A keyword of a call: its value if it is a literal, its source if not, None if it is not given."""
    for k in call.keywords:
        if k.arg == name:
            try:
                return ast.literal_eval(k.value)
            except ValueError:
                return ast.unparse(k.value)
    return None


def train_arguments(source: str) -> Dict[str, Dict[str, Any]]:
    """Arguments that a script adds to argparse parsers and groups, by their names in a recipe.

    Args:
        source: Python source of the script.

    Returns:
        type, list and choices of each argument.

    Raises:
        ValueError: If the script adds no arguments.
    """
    arguments = {}
    for call in ast.walk(ast.parse(source)):
        if not (isinstance(call, ast.Call) and getattr(call.func, 'attr', '') == 'add_argument'):
            continue
        flags = [ast.literal_eval(flag) for flag in call.args]
        long = next((flag for flag in flags if flag.startswith('--')), flags[0])
        name = keyword(call, 'dest') or long.lstrip('-').replace('-', '_')
        action = keyword(call, 'action') or 'store'
        arguments[name] = {
            'type': {'store_true': 'bool', 'utils.ParseKwargs': 'dict'}.get(action, keyword(call, 'type') or 'str'),
            'list': action == 'store' and (keyword(call, 'nargs') == '+' or isinstance(keyword(call, 'nargs'), int)),
            'choices': keyword(call, 'choices'),
        }
    if not arguments:
        raise ValueError('source: needs a script that adds arguments to an argparse parser')
    return dict(sorted(arguments.items()))


if __name__ == '__main__':
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit(__doc__)
    print(json.dumps(train_arguments(Path(sys.argv[1]).read_text()), indent=2))
