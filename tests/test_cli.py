"""The words of the command line, scripts that it runs, and names of earlier versions."""
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import timm_selfconv
from pictures import fill
from timm_selfconv._moved import MOVED
from timm_selfconv.cli import create_parser, main, parse_args
from timm_selfconv.commands._shared import COMMANDS

NET = 'sa_quadratic_tiny_cifar'
create_parser()  # fills the table
EACH = {name: function for members in COMMANDS.values() for name, (function, _) in members.items()}


def test_help_groups_all_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(['--help'])
    out = capsys.readouterr().out
    assert stopped.value.code == 0 and max(map(len, out.splitlines())) <= 120
    assert re.findall(r'^(\w.*):$', out, re.MULTILINE)[:-1] == [
        'use a net', 'train', 'transform weights', 'maintain the zoo']
    assert re.findall(r'^  (\w+)  +[A-Z]', out, re.MULTILINE) == list(EACH)


@pytest.mark.parametrize('name', EACH)
def test_help_of_a_command_begins_with_a_verb_and_has_an_example_that_parses(name, tmp_path, monkeypatch):
    summary, example = re.match(r'(\w+ .*\.)\n\nExamples?: timm-selfconv (.*)\n?', inspect.getdoc(EACH[name])).groups()
    assert summary.split()[0] in (
        'Classify', 'Describe', 'Draw', 'Drop', 'List', 'Measure', 'Name', 'Run', 'Train', 'Turn', 'Upload', 'Write')
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / 'pictures', ['cat'])
    for file in ('cat.jpg', 'run/last.pth.tar', 'validate.py'):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).touch()
    args = parse_args(shlex.split(example))
    assert args.command == name and args.function is EACH[name]


def test_answers_to_words(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('page.html').touch()
    answers = {  # to a command: its message
        '--version': f'timm-selfconv {timm_selfconv.__version__}\n',
        'list --recipes': 'muon_tiny ',
        'list --recipes paper': '/paper.yaml\n',
        'list --recipes paper.yaml': "recipe='paper.yaml'",
        'recipe paper': 'recipe: is now timm-selfconv list --recipes',
        'train paper --output run nowhere=1': 'nowhere',
        'train paper --output run nowhere': 'unrecognized arguments: nowhere',
        'classify resnet_tinny_cifar x.png': 'did you mean resnet_tiny_cifar',
        'heads vit_tiny_patch16_2244': 'did you mean vit_tiny_patch16_224,',
        f'explore {NET} page.html --out page.html': 'page.html exists',
        f'figures {NET} --out f.pdf': 'becomes a folder',
        f'export {NET} --checkpoint page.html --data x --output . --fact seed': 'needs KEY=VALUE',
    }
    for command, answer in answers.items():
        try:
            main(command.split())
        except SystemExit:
            pass
        assert answer in ''.join(capsys.readouterr()), command


def test_run_registers_the_zoo_for_any_script(tmp_path):
    (tmp_path / 'beside.py').write_text('VALUE = 7')
    script = tmp_path / 'script.py'
    script.write_text(
        'import sys, timm, beside\n'
        'assert __name__ == "__main__"\n'
        'print(timm.is_model(sys.argv[2]), sys.argv[1:], beside.VALUE)\n'
        'sys.exit(3)\n')
    command = [sys.executable, '-m', 'timm_selfconv', 'run', str(script), '--model', NET, '-b', '2']
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == f"True ['--model', '{NET}', '-b', '2'] 7"


@pytest.mark.slow
def test_run_under_torchrun(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(
        'import os, sys, timm\n'
        'open(sys.argv[1] + os.environ["RANK"], "w").write(str(timm.is_model("sa_quadratic_cifar")))\n')
    command = [
        sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', '-m', 'timm_selfconv',
        'run', str(script), str(tmp_path / 'rank')]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f'rank{i}').read_text() for i in range(2)] == ['True', 'True']


@pytest.mark.parametrize('old', [name for name, new in MOVED.items() if new])
def test_moved_modules_warn_and_have_the_names_of_their_new_place(old):
    new = importlib.import_module(f'timm_selfconv.{MOVED[old]}')
    sys.modules.pop(f'timm_selfconv.{old}', None)
    with pytest.warns(DeprecationWarning, match=f'timm_selfconv.{old} is now timm_selfconv.{MOVED[old]}'):
        module = importlib.import_module(f'timm_selfconv.{old}')
    names = getattr(new, '__all__', [name for name in vars(new) if name[0] != '_'])
    assert all(getattr(module, name) is getattr(new, name) for name in names)


def test_the_module_train_is_the_command(tmp_path):
    command = [sys.executable, '-m', 'timm_selfconv.train', 'paper', '--output', str(tmp_path / 'run'), 'epochs=none']
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, PYTHONWARNINGS='default'))
    assert done.returncode == 2 and "epochs='none'" in done.stderr
    assert 'DeprecationWarning: timm_selfconv.train is now timm_selfconv.commands.train' in done.stderr
