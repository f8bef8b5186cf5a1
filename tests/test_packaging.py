"""What is installed: every file of the package, the recipes with it."""
import pytest


@pytest.fixture(scope='module')
def settings(repo):
    tomllib = pytest.importorskip('tomllib')  # from Python 3.11 on
    return tomllib.loads((repo / 'pyproject.toml').read_text())['tool']['setuptools']


def test_every_folder_of_code_is_a_package(repo, settings):
    folders = {file.parent.relative_to(repo) for file in (repo / 'timm_selfconv').rglob('*.py')}
    assert set(settings['packages']) == {'.'.join(folder.parts) for folder in folders} | {'timm_selfconv.recipes'}


@pytest.mark.parametrize('package,folder', [('timm_selfconv', 'timm_selfconv'), ('timm_selfconv.recipes', 'recipes')])
def test_every_other_file_is_data_of_the_package(repo, settings, package, folder):
    folder = repo / folder
    assert repo / settings['package-dir'].get(package, package) == folder
    data = {file for pattern in settings['package-data'][package] for file in folder.glob(pattern)}
    files = {file for file in folder.rglob('*') if file.is_file() and file.suffix not in ('.py', '.pyc')}
    assert files and files <= data
