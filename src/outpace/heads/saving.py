"""Files that libraries write: what they raise over a full disk, as Python's own writers would."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from outpace.errors import reason_of


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Returns a context in which a file, or several in a folder, are written. Whatever a library
    raises because it cannot write is raised as the ``OSError`` that names the path, so that the
    caller of any writer has a single kind of error to expect."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        if not _is_of_a_writer(error):
            raise
        raise OSError(
            errno.EIO,
            f"a file cannot be written ({reason_of(error)}); make room on its disk, or name "
            "another folder",
            str(path),
        ) from error


def _is_of_a_writer(error: Exception) -> bool:
    """Safetensors has an error of its own, torch raises a ``RuntimeError``, and tokenizers a bare
    ``Exception``."""
    return isinstance(error, (SafetensorError, RuntimeError)) or type(error) is Exception
