"""Atomic file and directory writes.

Content goes to a temporary file or folder beside its target, reaches the disk, and gets its name: readers see the old
content or the new, never a part. Writers need no lock, as each has a temporary file of a random name; of two that
replace a file the last one counts, of two that make a new one the second is refused. A writer that is killed leaves one
`.timm_selfconv-*.tmp` at most, which nothing reads and which may be removed when no writer runs.
"""
import errno
import hashlib
import os
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, Type, Union

__all__ = ['check_new', 'new_folder', 'os_errors', 'replace_file', 'sha256', 'write_new']

PathLike = Union[str, Path]
NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF)  # of network file systems, and of Windows


def check_new(path: PathLike) -> None:
    """Refuse to overwrite a result, before the work that it would take.

    Raises:
        FileExistsError: If there is something already.
    """
    if os.path.lexists(path):
        raise FileExistsError(f'{path} exists: remove it or choose another name')


def sha256(path: PathLike) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def flush(*paths: Path) -> None:
    """Wait until files, and the names in folders, are on the disk, where the system can say so.

    Raises:
        OSError: If the disk is full or broken, which some file systems only tell now.
    """
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except PermissionError:  # Windows opens no folders
            continue
        try:
            os.fsync(descriptor)
        except OSError as e:
            if e.errno not in NO_FSYNC:
                raise
        finally:
            os.close(descriptor)


@contextmanager
def os_errors(what: Any, *kinds: Type[Exception]) -> Iterator[None]:
    """Raise errors of other kinds, such as those of torch.save and safetensors on a full disk, as an OSError."""
    try:
        yield
    except kinds as e:
        raise OSError(f'{what}: {e or type(e).__name__}') from e


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Name of a temporary file or folder beside ``path``, removed in the end if it is still there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'.timm_selfconv-{secrets.token_hex(8)}.tmp')
    try:
        yield temporary
    finally:
        if temporary.is_dir() and not temporary.is_symlink():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def replace_file(path: PathLike, write: Callable[[Path], Any]) -> None:
    """Write a file in the place of one that may exist.

    Args:
        path: Its path; the folder is created if need be.
        write: Writes the whole content to the path that it is given.

    Raises:
        OSError: If it can't be written whole; an existing file stays as it is.
    """
    path = Path(path)
    with temporary_beside(path) as temporary:
        with os_errors(f'{path} cannot be written, is the disk full?', RuntimeError):
            write(temporary)
        flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)


def write_new(path: PathLike, content: bytes) -> None:
    """Write a file that must not exist yet.

    Args:
        path: Its path; the folder is created if need be.
        content: All of it.

    Raises:
        FileExistsError: If there is something already, which stays as it is.
    """
    path = Path(path)
    check_new(path)
    with temporary_beside(path) as temporary:
        temporary.write_bytes(content)
        flush(temporary)
        try:
            os.link(temporary, path)  # unlike a rename it fails if there is something
        except OSError:
            check_new(path)
            os.rename(temporary, path)  # no links here (FAT): of two writers in one instant the last one counts
        flush(path.parent)


@contextmanager
def new_folder(path: PathLike) -> Iterator[Path]:
    """Make a folder that must not exist yet, with all of its files at once.

    Yields:
        An empty folder to fill; it gets its name when the block ends, and vanishes if the block raises.

    Raises:
        FileExistsError: If there is something already, which stays as it is.
    """
    path = Path(path)
    check_new(path)
    with temporary_beside(path) as temporary:
        temporary.mkdir()
        yield temporary
        flush(*temporary.rglob('*'), temporary)
        try:
            os.rename(temporary, path)
        except OSError:
            check_new(path)  # made meanwhile
            raise
        flush(path.parent)
