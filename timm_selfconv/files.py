"""Whole files or none: the one place that writes."""
import os
from pathlib import Path
from typing import Any, Callable, Union

__all__ = ['replace_file', 'write_new']


def write_new(path: Union[str, Path], content: bytes) -> None:
    """Write a file that must not exist yet, whole or not at all.

    Args:
        path: Where to; its folder is made if need be.
        content: What to write.

    Raises:
        FileExistsError: If there is a file already; it is left alone.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'.{path.name}.{os.getpid()}')
    try:
        temporary.write_bytes(content)
        os.link(temporary, path)  # unlike a rename, this fails where a file exists
    except FileExistsError:
        raise FileExistsError(f'{path} exists: remove it or choose another name') from None
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file in the place of one that may exist; whoever reads it sees the old or the new one, whole."""
    temporary = path.with_name(f'.{path.name}')
    write(temporary)
    os.replace(temporary, path)
