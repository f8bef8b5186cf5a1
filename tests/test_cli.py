"""The parser, its help and messages; scripts; old names of modules."""
import contextlib
import importlib
import inspect
import re
import runpy
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


def test_help_of_each_command_has_an_example_that_parses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, ['pictures/cat', 'run'])
    for file in ('cat.jpg', 'run/last.pth.tar', 'validate.py'):
        Path(file).touch()
    for name, function in EACH.items():
        example = re.match(r'[A-Z][a-z-]+ .*\.\n\nExamples?: timm-selfconv (.*)\n?', inspect.getdoc(function))[1]
        args = parse_args(shlex.split(example))
        assert args.command == name and args.function is function


def test_answers_that_need_no_net(capsys):
    for command, answer in {
            '--version': f'timm-selfconv {timm_selfconv.__version__}\n',
            'list --recipes': 'muon_tiny ',
            'list --recipes paper': '/paper.yaml\n',
            'classify resnet_tinny_cifar x.png': 'did you mean resnet_tiny_cifar',
            'heads vit_tiny_patch16_2244': 'did you mean vit_tiny_patch16_224,'}.items():
        with contextlib.suppress(SystemExit):
            main(command.split())
        assert answer in ''.join(capsys.readouterr()), command


def test_run_registers_the_zoo_for_any_script(tmp_path, as_a_script, capsys):
    (tmp_path / 'in_its_folder.py').write_text('VALUE = 7')
    script = tmp_path / 'script.py'
    script.write_text(
        'import sys, timm, in_its_folder\n'
        'assert __name__ == "__main__"\n'
        'print(timm.is_model(sys.argv[2]), sys.argv[1:], in_its_folder.VALUE)\n'
        'sys.exit(3)\n')
    with pytest.raises(SystemExit) as stopped:
        main(['run', str(script), '--model', NET, '-b', '2'])
    assert stopped.value.code == 3
    assert capsys.readouterr().out.strip() == f"True ['--model', '{NET}', '-b', '2'] 7"


@pytest.mark.slow
def test_run_under_torchrun(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text('import timm\nprint(timm.is_model("sa_quadratic_cifar"))')
    done = subprocess.run([
        sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', '-m', 'timm_selfconv',
        'run', str(script)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count('True') == 2, done.stderr


def test_moved_modules_warn_and_have_the_names_of_the_new_module(monkeypatch, capsys):
    for old, place in MOVED.items():
        if place:
            new = importlib.import_module(f'timm_selfconv.{place}')
            monkeypatch.delitem(sys.modules, f'timm_selfconv.{old}', raising=False)
            with pytest.warns(DeprecationWarning, match=f'timm_selfconv.{old} is now timm_selfconv.{place}'):
                module = importlib.import_module(f'timm_selfconv.{old}')
            names = getattr(new, '__all__', [name for name in vars(new) if name[0] != '_'])
            assert all(getattr(module, name) is getattr(new, name) for name in names)
    monkeypatch.delitem(sys.modules, 'timm_selfconv.train')
    monkeypatch.setattr(sys, 'argv', ['train', 'paper', '--output', 'run', 'epochs=none'])
    with pytest.warns(DeprecationWarning, match='is now timm_selfconv.commands.train'), pytest.raises(SystemExit):
        runpy.run_module('timm_selfconv.train', run_name='__main__')  # python -m timm_selfconv.train
    assert "epochs='none'" in capsys.readouterr().err
