"""Whole files or none, also where writers are killed, meet, or run out of disk."""
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from timm_selfconv import files


def test_what_is_written_is_there_whole_and_nothing_else(tmp_path):
    files.write_new(tmp_path / 'new' / 'file', b'content')
    files.replace_file(tmp_path / 'new' / 'file', lambda path: path.write_bytes(b'other'))
    with files.new_folder(tmp_path / 'folder') as folder:
        (folder / 'a').write_bytes(b'a')
    with files.replace_folder(tmp_path / 'folder') as folder:
        (folder / 'b').write_bytes(b'b')
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
    assert found == {'new/file': b'other', 'folder/b': b'b'}
    assert files.sha256(tmp_path / 'folder' / 'b') == '3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d'


def test_nothing_is_overwritten(tmp_path):
    files.write_new(tmp_path / 'file', b'first')
    (tmp_path / 'link').symlink_to('nowhere')
    for path in (tmp_path / 'file', tmp_path / 'link'):
        with pytest.raises(FileExistsError, match=f'{path.name} exists: remove it'):
            files.write_new(path, b'second')
        with pytest.raises(FileExistsError, match=f'{path.name} exists'), files.new_folder(path):
            pass
    assert (tmp_path / 'file').read_bytes() == b'first' and len(list(tmp_path.iterdir())) == 2


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError('disk full')

    monkeypatch.setattr(files.os, 'replace', fail)
    with pytest.raises(OSError, match=r'disk full'):
        files.write_new(tmp_path / 'file', b'content')
    with pytest.raises(OSError, match=r'disk full'), files.new_folder(tmp_path / 'folder') as folder:
        (folder / 'a').write_bytes(b'a')
    assert list(tmp_path.iterdir()) == []


WRITER = """
import itertools, runpy, sys, time
from pathlib import Path
replace_file = runpy.run_path(sys.argv[3])['replace_file']  # without the package, which imports torch
path, letter = Path(sys.argv[1]), sys.argv[2].encode()
for i in itertools.count():
    replace_file(path, lambda file: file.write_bytes(letter * 300_000))
    if i % 10 == 9:
        time.sleep(0.1)  # the lock is not fair: let the other have it
"""


@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='needs signals of Unix')
def test_writers_that_meet_and_are_killed_leave_one_whole_file(tmp_path):
    path = tmp_path / 'file'
    for letters in ('ab', 'cd'):  # the second pair finds what the first left behind
        writers = [
            subprocess.Popen([sys.executable, '-c', WRITER, str(path), letter, files.__file__]) for letter in letters]
        expected, seen, start = {letter.encode() for letter in letters}, set(), time.monotonic()
        while not seen >= expected and time.monotonic() < start + 60:  # the file may be of the first pair yet
            content = path.read_bytes() if path.exists() else b''
            if content:
                assert len(content) == 300_000 and len(set(content)) == 1
                seen.add(content[:1])
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        assert seen >= expected
    files.replace_file(path, lambda file: file.write_bytes(b'last'))
    assert path.read_bytes() == b'last' and os.listdir(tmp_path) == ['file']


def test_of_two_that_make_a_new_file_one_is_told(tmp_path):
    errors = []

    def write(content):
        try:
            files.write_new(tmp_path / 'file', content)
        except FileExistsError as e:
            errors.append(e)

    threads = [threading.Thread(target=write, args=(bytes([i]) * 1000,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = (tmp_path / 'file').read_bytes()
    assert len(errors) == 7 and len(content) == 1000 and len(set(content)) == 1
