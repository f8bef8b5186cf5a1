"""The list of packages. recipes/ is installed as timm_selfconv.recipes. Everything else is in pyproject.toml."""
from setuptools import find_namespace_packages, setup

setup(packages=[*find_namespace_packages(include=['timm_selfconv*']), 'timm_selfconv.recipes'])
