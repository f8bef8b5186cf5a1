"""The installed package has all files and recipes, and its list of public names is current."""
import subprocess
import sys

from timm_selfconv.reference import PAGE, reference

CODE = """from setuptools.dist import Distribution
import distutils.core
build = distutils.core.run_setup('setup.py', stop_after='config').get_command_obj('build_py')
build.ensure_finalized()
print(*(f'{folder}/{file}' for _, folder, _, files in build.data_files for file in files), sep='\\n')
print(*(file for _, _, file in build.find_all_modules()), sep='\\n')"""


def test_every_file_of_the_package_and_every_recipe_is_installed(repo):
    done = subprocess.run([sys.executable, '-c', CODE], cwd=repo, capture_output=True, text=True)
    installed = {(repo / line).resolve() for line in done.stdout.splitlines()}
    files = {file for folder in ('timm_selfconv', 'recipes') for file in (repo / folder).rglob('*')}
    assert {file for file in files if file.is_file() and file.suffix != '.pyc'} <= installed, done.stderr


def test_the_page_of_public_names_is_current():
    assert PAGE.read_text() == reference(), 'run: python -m timm_selfconv.reference'
