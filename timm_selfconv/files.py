"""Atomic file and directory writes.

Content goes to a temporary folder beside its target, reaches the disk, and is moved to its name: readers see the old
content or the new, never a part. Writers need no lock, as each has a folder of its own; of two that replace a file the
last one counts, of two that make a new one the second is refused. A writer that is killed leaves one folder
`.timm_selfconv-*.tmp` at most, which nothing reads and which may be removed when no writer runs.
"""
import errno
import hashlib
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, Type, Union

__all__ = ['PICTURES', 'check_new', 'new_folder', 'os_errors', 'replace_file', 'sha256', 'write_new']

PathLike = Union[str, Path]
PICTURES = ('.bmp', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp')  # names of those taken of a folder end so
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


@contextmanager
def os_errors(what: Any, *kinds: Type[Exception]) -> Iterator[None]:
    """Raise errors of other kinds, such as those of torch.save and safetensors on a full disk, as an OSError."""
    try:
        yield
    except kinds as e:
        raise OSError(f'{what}: {e or type(e).__name__}') from e


def flush(*paths: Path) -> None:
    """Wait until files, and the names in folders, are on the disk, where the system can say so."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except PermissionError:  # Windows opens no folders
            continue
        try:
            os.fsync(descriptor)
        except OSError as e:  # some file systems only tell now that the disk is full or broken
            if e.errno not in NO_FSYNC:
                raise
        finally:
            os.close(descriptor)


@contextmanager
def written_beside(path: Path, give_name: Callable[[Path, Path], None]) -> Iterator[Path]:
    """Yields where to write a file or folder, which ``give_name`` moves from there to its path when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.timm_selfconv-', suffix='.tmp', dir=path.parent) as folder:
        temporary = Path(folder, path.name)
        yield temporary
        flush(*temporary.rglob('*'), temporary)
        give_name(temporary, path)
        flush(path.parent)


def name_new(temporary: Path, path: Path) -> None:
    """Give a file or folder a name that nothing has."""
    try:
        (os.rename if temporary.is_dir() else os.link)(temporary, path)  # unlike a file's rename they overwrite nothing
    except OSError:
        check_new(path)
        os.rename(temporary, path)  # no links here (FAT): of two writers in one instant the last one counts


def replace_file(path: PathLike, write: Callable[[Path], Any]) -> None:
    """Write a file in the place of one that may exist.

    Args:
        path: Its path; the folder is created if need be.
        write: Writes the whole content to the path that it is given.

    Raises:
        OSError: If it can't be written whole; an existing file stays as it is.
    """
    with written_beside(Path(path), os.replace) as temporary:
        with os_errors(f'{path} cannot be written, is the disk full?', RuntimeError):
            write(temporary)


def write_new(path: PathLike, content: bytes) -> None:
    """Write a file that must not exist yet.

    Args:
        path: Its path; the folder is created if need be.
        content: All of it.

    Raises:
        FileExistsError: If there is something already, which stays as it is.
    """
    check_new(path)
    with written_beside(Path(path), name_new) as temporary:
        temporary.write_bytes(content)


@contextmanager
def new_folder(path: PathLike) -> Iterator[Path]:
    """Make a folder that must not exist yet, with all of its files at once.

    Yields:
        An empty folder to fill; it gets its name when the block ends, and vanishes if the block raises.

    Raises:
        FileExistsError: If there is something already, which stays as it is.
    """
    check_new(path)
    with written_beside(Path(path), name_new) as temporary:
        temporary.mkdir()
        yield temporary
