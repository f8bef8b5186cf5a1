"""The chapter names everything that it is about, in the words of the code."""
import inspect
import re
from pathlib import Path

from timm_selfconv import theory

CHAPTER = Path(theory.__file__).with_name('README.md').read_text()


def test_every_public_name_has_its_line():
    public = {n: v for n, v in vars(theory).items() if not n.startswith('_') and not inspect.ismodule(v)}
    first = {name: re.sub(r':\w+:`|``', '`', inspect.getdoc(value).splitlines()[0]) for name, value in public.items()}
    rows = dict(re.findall(r'^\| `(\w+)` \| (.*) \|$', CHAPTER, re.MULTILINE))
    assert rows == first
