"""The chapter on nets names every public function and class, in the words of the code."""
import inspect
import re
from pathlib import Path

from timm_selfconv import layers, models


def test_every_public_name_has_its_line():
    chapter = Path(models.__file__).with_name('README.md').read_text()
    rows = dict(re.findall(r'^\| `(\w+)` \| (.*) \|$', chapter.split('## Reference')[1], re.MULTILINE))
    public = {n: v for m in (models, layers) for n, v in vars(m).items() if not n.startswith('_') and callable(v)}
    assert rows == {name: inspect.getdoc(v).splitlines()[0].replace('``', '`') for name, v in public.items()}
