"""The list of packages; all else is in pyproject.toml. recipes/ is installed as the package timm_selfconv.recipes."""
from setuptools import find_namespace_packages, setup

setup(packages=[*find_namespace_packages(include=['timm_selfconv*']), 'timm_selfconv.recipes'])
