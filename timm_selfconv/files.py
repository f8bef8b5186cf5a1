"""Whole files or none: the one place that writes.

What is written goes to a temporary file beside its target, reaches the disk, and is renamed: whoever reads the target
sees the old content or the new, never a part. One process at a time writes a target; the lock is the operating
system's, so a kill frees it, and the next writer takes over the temporary file of one that was killed.
"""
import getpass
import hashlib
import os
import shutil
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, Union

from filelock import FileLock

__all__ = ['check_new', 'new_folder', 'replace_file', 'replace_folder', 'sha256', 'write_new']

PathLike = Union[str, Path]


def check_new(path: PathLike) -> None:
    """Refuse to overwrite a result, before the work that it would take.

    Raises:
        FileExistsError: If there is something already.
    """
    if os.path.lexists(path):
        raise FileExistsError(f'{path} exists: remove it or choose another name')


def sha256(path: PathLike) -> str:
    """Checksum of a file's content, hexadecimal."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, where the system can say so."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems can't
        pass
    finally:
        os.close(descriptor)


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """The name of a temporary file or folder that this process alone may use to make ``path``; gone in the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    who = f'{socket.gethostname()}.{getpass.getuser()}'
    name = hashlib.sha256(f'{who}:{path.resolve()}'.encode()).hexdigest()[:32]
    temporary = path.with_name(f'.{path.name}.{who}.tmp')
    with FileLock(Path(tempfile.gettempdir(), f'timm_selfconv-{name}.lock')):
        remove(temporary)  # of a writer that was killed
        try:
            yield temporary
        finally:
            remove(temporary)


def remove(path: Path) -> None:
    """Remove a file or folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move(temporary: Path, path: Path) -> None:
    """Give a finished file or folder its name, once its content is on the disk."""
    for file in sorted(temporary.rglob('*')) if temporary.is_dir() else [temporary]:
        if file.is_file():
            flush(file)
    os.replace(temporary, path)
    flush(path.parent)


def replace_file(path: PathLike, write: Callable[[Path], Any]) -> None:
    """Write a file in the place of one that may exist.

    Args:
        path: Where to; its folder is made if need be.
        write: Writes the whole content to the path that it is given.
    """
    path = Path(path)
    with temporary_beside(path) as temporary:
        write(temporary)
        move(temporary, path)


def write_new(path: PathLike, content: bytes) -> None:
    """Write a file that must not exist yet.

    Args:
        path: Where to; its folder is made if need be.
        content: What to write.

    Raises:
        FileExistsError: If there is something already; it is left alone.
    """
    path = Path(path)
    with temporary_beside(path) as temporary:
        check_new(path)
        temporary.write_bytes(content)
        move(temporary, path)


@contextmanager
def new_folder(path: PathLike) -> Iterator[Path]:
    """Make a folder that must not exist yet, with all of its files at once.

    Yields:
        An empty folder to fill; it gets its name when the block ends, and vanishes if the block raises.

    Raises:
        FileExistsError: If there is something already; it is left alone.
    """
    path = Path(path)
    check_new(path)
    with temporary_beside(path) as temporary:
        temporary.mkdir()
        yield temporary
        check_new(path)
        move(temporary, path)


@contextmanager
def replace_folder(path: PathLike) -> Iterator[Path]:
    """Make a folder in the place of one that may exist; between the old and the new one it is missing for a moment.

    Yields:
        An empty folder to fill, as :func:`new_folder`.
    """
    path = Path(path)
    with temporary_beside(path) as temporary:
        temporary.mkdir()
        yield temporary
        remove(path)
        move(temporary, path)
