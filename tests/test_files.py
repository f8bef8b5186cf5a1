"""Atomic writes, with killed and simultaneous writers and a full disk."""
import errno
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from timm_selfconv import files


def test_written_files_are_complete(tmp_path):
    files.write_new(tmp_path / 'new' / 'file', b'content')
    files.replace_file(tmp_path / 'new' / 'file', lambda path: path.write_bytes(b'other'))
    with files.new_folder(tmp_path / 'folder') as folder:
        (folder / 'a').write_bytes(b'a')
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
    assert found == {'new/file': b'other', 'folder/a': b'a'}
    assert files.sha256(tmp_path / 'folder' / 'a') == 'ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb'


def test_nothing_is_overwritten(tmp_path):
    files.write_new(tmp_path / 'file', b'first')
    (tmp_path / 'link').symlink_to('nowhere')
    for path in (tmp_path / 'file', tmp_path / 'link'):
        with pytest.raises(FileExistsError, match=f'{path.name} exists: remove it'):
            files.write_new(path, b'second')
        with pytest.raises(FileExistsError, match=f'{path.name} exists'), files.new_folder(path):
            pass
    assert (tmp_path / 'file').read_bytes() == b'first' and len(list(tmp_path.iterdir())) == 2


WRITER = """
import itertools, runpy, sys
from pathlib import Path
replace_file = runpy.run_path(sys.argv[3])['replace_file']  # without the package, which imports torch
path, letter = Path(sys.argv[1]), sys.argv[2].encode()
for i in itertools.count():
    replace_file(path, lambda file: file.write_bytes(letter * 100_000))
"""


@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='needs signals of Unix')
def test_simultaneous_and_killed_writers_leave_one_complete_file(tmp_path):
    folder = tmp_path / 'out'
    path = folder / 'file'
    for letters in ('ab', 'cd'):  # the second pair starts with the files of the first
        writers = []
        for letter in letters:  # as for users or containers that share a disk, each has a separate temporary folder
            (tmp_path / letter).mkdir()
            writers.append(subprocess.Popen(
                [sys.executable, '-c', WRITER, str(path), letter, files.__file__],
                env=dict(os.environ, TMPDIR=str(tmp_path / letter))))
        expected, seen, reads, start = {letter.encode() for letter in letters}, set(), 0, time.monotonic()
        # the file may be of the first pair yet
        while (not seen >= expected or reads < 50) and time.monotonic() < start + 60:
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                assert not reads  # the file always exists
                continue
            reads += 1
            assert len(content) == 100_000 and len(set(content)) == 1
            seen.add(content[:1])
        for writer in writers:
            assert writer.poll() is None  # no writer fails because of the other
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        assert seen >= expected and not any(os.listdir(tmp_path / letter) for letter in letters)
    files.replace_file(path, lambda file: file.write_bytes(b'last'))
    left = set(os.listdir(folder)) - {'file'}
    assert path.read_bytes() == b'last' and len(left) <= 4  # at most one of each writer that was killed
    assert all(name.startswith('.timm_selfconv-') and name.endswith('.tmp') for name in left)


def test_the_second_writer_of_a_new_file_gets_an_error(tmp_path):
    contents = [bytes([i]) * 1000 for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(files.write_new, tmp_path / 'file', content) for content in contents]
    errors = [each.exception() for each in done]
    assert [type(error) for error in errors if error] == [FileExistsError] * 7
    assert (tmp_path / 'file').read_bytes() == contents[errors.index(None)]


def test_the_second_writer_of_a_new_folder_gets_an_error(tmp_path):
    path = tmp_path / 'folder'
    with pytest.raises(FileExistsError, match=r'folder exists: remove it'), files.new_folder(path) as one:
        (one / 'file').write_bytes(b'one')
        with files.new_folder(path) as other:
            (other / 'file').write_bytes(b'other')
    assert list(tmp_path.iterdir()) == [path] and (path / 'file').read_bytes() == b'other'


def test_a_checkpoint_that_outgrows_a_limit_is_an_oserror(tmp_path, limit):
    """torch.save raises RuntimeError: unexpected pos 832 vs 726."""
    files.replace_file(tmp_path / 'last.pth.tar', lambda path: torch.save(torch.zeros(10), path))
    before = (tmp_path / 'last.pth.tar').read_bytes()
    with limit(20_000), pytest.raises(OSError, match=r'last.pth.tar cannot be written, is the disk full\?: '):
        files.replace_file(tmp_path / 'last.pth.tar', lambda path: torch.save(torch.zeros(100_000), path))
    assert os.listdir(tmp_path) == ['last.pth.tar'] and (tmp_path / 'last.pth.tar').read_bytes() == before


def let_fail(monkeypatch, number, *names):
    """Make functions of os fail with an error number."""
    for name in names:
        monkeypatch.setattr(files.os, name, mock.Mock(side_effect=OSError(number, os.strerror(number))))


@pytest.mark.parametrize('names', [['fsync'], ['link', 'rename', 'replace']], ids=str)  # fsync: as network drives do
def test_a_disk_that_is_full_in_the_end_leaves_nothing(tmp_path, monkeypatch, names):
    let_fail(monkeypatch, errno.ENOSPC, *names)
    with pytest.raises(OSError, match='No space left'):
        files.write_new(tmp_path / 'file', b'content')
    with pytest.raises(OSError, match='No space left'):
        files.replace_file(tmp_path / 'file', lambda path: path.write_bytes(b'content'))
    with pytest.raises(OSError, match='No space left'), files.new_folder(tmp_path / 'folder') as folder:
        (folder / 'a').write_bytes(b'a')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('number,name', [(errno.EPERM, 'link'), (errno.EINVAL, 'fsync')])  # FAT, network drives
def test_new_files_are_complete_without_links_or_flushes(tmp_path, monkeypatch, number, name):
    let_fail(monkeypatch, number, name)
    files.write_new(tmp_path / 'file', b'first')
    with pytest.raises(FileExistsError, match=r'file exists: remove it'):
        files.write_new(tmp_path / 'file', b'second')
    assert (tmp_path / 'file').read_bytes() == b'first' and len(list(tmp_path.iterdir())) == 1


def test_the_longest_names_and_the_user_s_permissions(tmp_path):
    path = tmp_path / ('x' * 255)
    files.write_new(path, b'content')
    (tmp_path / 'plain').write_bytes(b'content')
    assert path.stat().st_mode == (tmp_path / 'plain').stat().st_mode
