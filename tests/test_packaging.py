"""What is installed: every file of the package, the recipes with it."""
from pathlib import Path

import pytest

from timm_selfconv.cli import main


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


def test_recipe_prints_the_path_of_each(repo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file in (repo / 'recipes').glob('*.yaml'):
        main(['recipe', file.stem])
        assert Path(capsys.readouterr().out.strip()).read_text() == file.read_text()


def test_recipe_that_there_is_not(repo, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(['recipe', 'paper.yaml'])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count('\n') == 1 and "recipe='paper.yaml'" in error
    assert all(file.stem in error for file in (repo / 'recipes').glob('*.yaml'))
