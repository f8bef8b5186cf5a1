"""The settings are in pyproject.toml. For the package index: TIMM_SELFCONV_WEIGHTS=tiny python -m build --wheel

makes a wheel with the weights of the tiny nets only, as those of the others come from the Hub, and without the
gallery's pictures, which only a checkout's READMEs show.
"""
import os
import re
from pathlib import Path
from typing import Any, Dict

from setuptools import setup

# an index shows the README without the files beside it: their pictures, with the caption, go, their links are words
readme = re.sub(r'!\[[^]]*\]\((?!http)[^)]*\)\n\n(\*[^*]+\*\n\n)?', '', Path('README.md').read_text(encoding='utf-8'))
readme = re.sub(r'\[([^]]+)\]\((?!http)[^)]*\)', r'\1', readme)
settings: Dict[str, Any] = dict(long_description=readme, long_description_content_type='text/markdown')
if os.environ.get('TIMM_SELFCONV_WEIGHTS') == 'tiny':
    files = [file.name for file in Path('timm_selfconv', 'weights').glob('*.safetensors') if 'tiny' not in file.name]
    settings.update(
        # to setuptools they are files of the package weights, and of the one above it
        exclude_package_data={
            'timm_selfconv': ['look/gallery/*', *(f'weights/{file}' for file in files)],
            'timm_selfconv.look': ['gallery/*'], 'timm_selfconv.weights': files},
        options=dict(build=dict(build_base='build/tiny')),  # what lies in build is put in the wheel, too
    )
setup(**settings)
