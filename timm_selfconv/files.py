"""Atomic writes of files and folders, and the search for pictures in a folder.

Content is written to a temporary folder next to its target, flushed to the disk and renamed. Readers see the old
content or the new, never a part. If two writers replace a file, the last one wins. If two create a new file, the second
one fails. A killed writer leaves at most a folder `.timm_selfconv-*.tmp`.
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
PICTURES = ('.bmp', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp')
NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF)  # network file systems and Windows
_logger = logging.getLogger(__name__)


def check_new(path: PathLike) -> None:
    """Raise a FileExistsError if a path exists."""
    if os.path.lexists(path):
        raise FileExistsError(f'{path} exists: remove it or choose another name')


def natural_key(name: str) -> Tuple[List[Any], str]:
    """Sort key that puts 2 before 10, with a fixed order of names that differ only in case or zeros."""
    return [int(part) if part.isdecimal() else part for part in re.split(r'(\d+)', name.lower())], name


def is_hidden(name: str) -> bool:
    """Return True for names that begin with a dot, ``__MACOSX`` and ``Thumbs.db``."""
    return name[0] == '.' or name in ('__MACOSX', 'Thumbs.db')


def picture_files(folder: PathLike, endings: Tuple[str, ...] = PICTURES) -> List[Path]:
    """List files with these endings in a folder and its subfolders, in natural order, without hidden files."""
    found = [Path(root, name) for root, _, names in os.walk(folder, followlinks=True)
             for name in names if name.lower().endswith(endings)]
    shown = [file for file in found if not any(map(is_hidden, file.relative_to(folder).parts))]
    if len(shown) < len(found):
        _logger.warning('%s: %d hidden files are ignored', folder, len(found) - len(shown))
    return sorted(shown, key=lambda file: natural_key(str(file)))


def sha256(path: PathLike) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@contextmanager
def as_value_error(what: str) -> Iterator[None]:
    """Convert any error in this context to a ValueError with one line that begins with ``what``."""
    try:
        yield
    except Exception as e:  # a broken checkpoint or imported module may raise anything
        message = ' '.join(str(e).split()) or type(e).__name__
        raise ValueError(message if message.startswith(f'{what}: ') else f'{what}: {message}') from e


@contextmanager
def os_errors(what: PathLike, *kinds: Type[Exception]) -> Iterator[None]:
    """Convert errors of these kinds, which torch.save and safetensors raise on a full disk, to an OSError."""
    try:
        yield
    except kinds as e:
        raise OSError(f'{what}: {e or type(e).__name__}') from e


def flush(*paths: Path) -> None:
    """Wait until files and folders are on the disk, if the system supports it."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except PermissionError:  # folders on Windows
            continue
        try:
            os.fsync(descriptor)
        except OSError as e:  # some file systems report a full disk only here
            if e.errno not in NO_FSYNC:
                raise
        finally:
            os.close(descriptor)


@contextmanager
def written_beside(path: Path, give_name: Callable[[Path, Path], None]) -> Iterator[Path]:
    """Yield a temporary path for a file or folder. After the block, ``give_name`` moves it to its final path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='.timm_selfconv-', suffix='.tmp', dir=path.parent) as folder:
        temporary = Path(folder, path.name)
        yield temporary
        flush(*temporary.rglob('*'), temporary)
        give_name(temporary, path)
        flush(path.parent)


def name_new(temporary: Path, path: Path) -> None:
    try:
        (os.rename if temporary.is_dir() else os.link)(temporary, path)  # these do not overwrite
    except OSError:
        check_new(path)
        os.rename(temporary, path)  # no links (FAT): the last of two simultaneous writers wins


def replace_file(path: PathLike, write: Callable[[Path], Any]) -> None:
    """Create or replace a file with ``write(path)``, and create its folder. After an error, the old file remains."""
    with written_beside(Path(path), os.replace) as temporary:
        with os_errors(f'{path} cannot be written, is the disk full?', RuntimeError):
            write(temporary)


def write_new(path: PathLike, content: bytes) -> None:
    """Write a new file and create its folder; raise a FileExistsError if the path exists."""
    check_new(path)
    with written_beside(Path(path), name_new) as temporary:
        temporary.write_bytes(content)


@contextmanager
def new_folder(path: PathLike) -> Iterator[Path]:
    """Create a new folder with the files that the block writes. If the block raises, the folder is not created."""
    check_new(path)
    with written_beside(Path(path), name_new) as temporary:
        temporary.mkdir()
        yield temporary
