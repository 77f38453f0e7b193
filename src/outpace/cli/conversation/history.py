"""The file that keeps what was typed, for the arrow keys of the next conversation."""

from __future__ import annotations

import os
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from outpace.errors import ConfigError


def state_folder() -> Path:
    """Returns the folder of what programs remember between two runs, as the XDG rules name it.

    Raises ``ConfigError`` where it would be in a home folder, and there is none.
    """
    named = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(named):
        return Path(named) / "outpace"
    try:
        return Path.home() / ".local" / "state" / "outpace"
    except RuntimeError as error:  # a user who is not known here, as in some containers
        raise ConfigError(
            "the history cannot be kept, since there is no home folder: add --no-history, or set "
            "XDG_STATE_HOME to a folder of yours."
        ) from error


def history(kept: bool) -> History:
    """Returns what was typed before, in a file that only its owner can read.

    kept: False remembers nothing beyond this run. Raises ``ConfigError`` where the file cannot be
    written.
    """
    if not kept:
        return InMemoryHistory()
    file = state_folder() / "chat_history"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.chmod(file, 0o600)  # one that an earlier umask made readable
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(
            f"the history cannot be kept in {str(file)!r} ({error.strerror}): add --no-history, or "
            "set XDG_STATE_HOME to a folder of yours."
        ) from error
    return FileHistory(str(file))
