"""Atomic file and directory writes, and the walk that finds pictures in a folder.

Content goes to a temporary folder beside its target, reaches the disk, and is moved to its name: readers see the old
content or the new, never a part. If two writers replace a file, the last one counts. If two make a new file, the second
is refused. A writer that is killed leaves at most one folder `.timm_selfconv-*.tmp`, which nothing reads.
"""
import errno
import hashlib
import logging
import os
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, List, Tuple, Type, Union

__all__ = [
    'PICTURES', 'as_value_error', 'check_new', 'is_hidden', 'natural_key', 'new_folder', 'os_errors', 'picture_files',
    'replace_file', 'sha256', 'write_new']

PathLike = Union[str, Path]
PICTURES = ('.bmp', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp')  # endings of names
NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF)  # of network file systems, and of Windows
_logger = logging.getLogger(__name__)


def check_new(path: PathLike) -> None:
    """Raise a FileExistsError if a path exists, before the work that its content would take."""
    if os.path.lexists(path):
        raise FileExistsError(f'{path} exists: remove it or choose another name')


def natural_key(name: str) -> Tuple[List[Any], str]:
    """Sort key by which 2 comes before 10 and names that differ only in case or zeros have one order."""
    return [int(part) if part.isdecimal() else part for part in re.split(r'(\d+)', name.lower())], name


def is_hidden(name: str) -> bool:
    """Return True for a name that begins with a dot, ``__MACOSX`` and ``Thumbs.db``: they are no data."""
    return name[0] == '.' or name in ('__MACOSX', 'Thumbs.db')


def picture_files(folder: PathLike, endings: Tuple[str, ...] = PICTURES) -> List[Path]:
    """Files in a folder and its folders with these endings, in natural order; logs how many hidden ones it leaves out.
    """
    found = [Path(root, name) for root, _, names in os.walk(folder, followlinks=True)
             for name in names if name.lower().endswith(endings)]
    shown = [file for file in found if not any(map(is_hidden, file.relative_to(folder).parts))]
    if len(shown) < len(found):
        _logger.warning('%s: %d hidden files are left out', folder, len(found) - len(shown))
    return sorted(shown, key=lambda file: natural_key(str(file)))


def sha256(path: PathLike) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@contextmanager
def as_value_error(what: str) -> Iterator[None]:
    """Raise any error of this context as a ValueError of one line that begins with ``what``."""
    try:
        yield
    except Exception as e:  # a broken checkpoint raises anything, as a module that is imported by name does
        message = ' '.join(str(e).split()) or type(e).__name__
        raise ValueError(message if message.startswith(f'{what}: ') else f'{what}: {message}') from e


@contextmanager
def os_errors(what: Any, *kinds: Type[Exception]) -> Iterator[None]:
    """Raise errors of these kinds, which torch.save and safetensors raise on a full disk, as an OSError."""
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
    """Replace a file, or make it and its folder, by ``write(path)``; the old file stays if an error is raised."""
    with written_beside(Path(path), os.replace) as temporary:
        with os_errors(f'{path} cannot be written, is the disk full?', RuntimeError):
            write(temporary)


def write_new(path: PathLike, content: bytes) -> None:
    """Write a new file, and its folder if need be; raise a FileExistsError if the path exists."""
    check_new(path)
    with written_beside(Path(path), name_new) as temporary:
        temporary.write_bytes(content)


@contextmanager
def new_folder(path: PathLike) -> Iterator[Path]:
    """Make a new folder of the files that the block writes into it, unless the block raises or the path exists."""
    check_new(path)
    with written_beside(Path(path), name_new) as temporary:
        temporary.mkdir()
        yield temporary
