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
    """With the longest names and the user's permissions."""
    path = tmp_path / 'new' / ('x' * 255)
    files.write_new(path, b'content')
    (tmp_path / 'plain').write_bytes(b'content')
    assert path.stat().st_mode == (tmp_path / 'plain').stat().st_mode
    files.replace_file(path, lambda path: path.write_bytes(b'other'))
    with files.new_folder(tmp_path / 'folder') as folder:
        (folder / 'a').write_bytes(b'a')
    found = {path.name: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
    assert found == {path.name: b'other', 'plain': b'content', 'a': b'a'}
    assert files.sha256(tmp_path / 'folder' / 'a') == 'ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb'


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / 'file').write_bytes(b'first')
    (tmp_path / 'link').symlink_to('nowhere')
    for path in (tmp_path / 'file', tmp_path / 'link'):
        with pytest.raises(FileExistsError, match=f'{path.name} exists: remove it'):
            files.write_new(path, b'second')
        with pytest.raises(FileExistsError, match=f'{path.name} exists'), files.new_folder(path):
            pass
    with pytest.raises(FileExistsError, match=r'folder exists: remove it'), files.new_folder(tmp_path / 'folder'):
        with files.new_folder(tmp_path / 'folder') as other:
            (other / 'file').write_bytes(b'of the writer that finished first')
    assert (tmp_path / 'file').read_bytes() == b'first' and (tmp_path / 'folder' / 'file').exists()
    assert len(list(tmp_path.iterdir())) == 3


def test_the_second_writer_of_a_new_file_gets_an_error(tmp_path):
    contents = [bytes([i]) * 1000 for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(files.write_new, tmp_path / 'file', content) for content in contents]
    errors = [each.exception() for each in done]
    assert [type(error) for error in errors if error] == [FileExistsError] * 7
    assert (tmp_path / 'file').read_bytes() == contents[errors.index(None)]


WRITER = """
import runpy, sys
replace_file = runpy.run_path(sys.argv[3])['replace_file']  # without the package, which imports torch
while True:
    replace_file(sys.argv[1], lambda file: file.write_bytes(sys.argv[2].encode() * 100_000))
"""


@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='needs signals of Unix')
def test_simultaneous_and_killed_writers_leave_one_complete_file(tmp_path):
    path, seen, start = tmp_path / 'file', [], time.monotonic()
    writers = [subprocess.Popen([sys.executable, '-c', WRITER, str(path), c, files.__file__]) for c in 'ab']
    try:
        while (len(set(seen)) < 2 or len(seen) < 50) and time.monotonic() < start + 60:
            if seen or path.exists():  # from then on, it always exists
                content = path.read_bytes()
                assert len(content) == 100_000 and len(set(content)) == 1
                seen.append(content[:1])
        assert all(writer.poll() is None for writer in writers)  # no writer fails because of the other
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert set(seen) == {b'a', b'b'}
    files.replace_file(path, lambda file: file.write_bytes(b'last'))
    left = set(os.listdir(tmp_path)) - {'file'}
    assert path.read_bytes() == b'last' and len(left) <= 2  # at most one of each writer that was killed
    assert all(name.startswith('.timm_selfconv-') and name.endswith('.tmp') for name in left)


def test_files_that_outgrow_a_limit_are_an_oserror(tmp_path, limit):
    """torch.save raises RuntimeError: unexpected pos 832 vs 726."""
    path = tmp_path / 'last.pth.tar'
    path.write_bytes(b'before')
    with limit(20_000):
        with pytest.raises(OSError, match=r'last.pth.tar cannot be written, is the disk full\?: '):
            files.replace_file(path, lambda path: torch.save(torch.zeros(100_000), path))
        with pytest.raises(OSError, match='File too large'):
            files.write_new(tmp_path / 'new' / 'page.html', bytes(100_000))
    assert [file for file in tmp_path.rglob('*') if file.is_file()] == [path] and path.read_bytes() == b'before'


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
