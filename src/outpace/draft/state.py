"""The state file, which keeps what was learned of drafters between runs: plain JSON, which can be
looked at and never runs code."""

from __future__ import annotations

import atexit
import json
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from outpace.core.options import Reads
from outpace.core.values import shown
from outpace.errors import ConfigError
from outpace.files import replacing


def _file_name(name: str, value: Any) -> Any:
    if not isinstance(value, (str, os.PathLike)) or "\0" in str(value):
        raise ConfigError(f"{name} must be the name of a file, not {shown(value)}.")
    return value


FileName = Annotated[Any, Reads(_file_name)]
"""The type of an option that names a file."""


SECONDS = 10.0
"""How long the file may be behind what is known, while texts are being written."""


class StateFile:
    """Numbers by drafter, kept between runs.

    To write them after each text would hold up the round that follows. They are written when
    nobody waits for a text (`flush`), before the program ends, and every `SECONDS` on the way, by
    a thread of its own.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        method: str,
        drafters: Sequence[str],
        models: Sequence[str] = (),
    ) -> None:
        """method, drafters, models: whose numbers these are; a file of others is refused. models:
        digests of the target and the draft models."""
        self._path = Path(path)
        self._whose = {"method": method, "drafters": list(drafters), "models": list(models)}
        self._warned = False
        self._state: Callable[[], Mapping[str, Any]] = dict
        self._unwritten = False
        self._written = time.monotonic()
        self._writing: threading.Thread | None = None

    def keep(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Takes what will be written from now on. state: returns what is known, between rounds."""
        self._state = state
        _flush_at_exit(weakref.ref(self))

    def changed(self) -> None:
        """Notes, between rounds, that more is known than is written."""
        self._unwritten = True
        busy = self._writing is not None and self._writing.is_alive()
        if not busy and time.monotonic() - self._written > SECONDS:
            state = self._taken()
            self._writing = threading.Thread(target=self.save, args=(state,), name="outpace-state")
            self._writing.start()

    def flush(self) -> None:
        """Writes what is known and not written; nobody runs a round meanwhile."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._unwritten:
            self.save(self._taken())

    def _taken(self) -> Mapping[str, Any]:
        self._unwritten, self._written = False, time.monotonic()
        return self._state()

    def load(self) -> Mapping[str, Any] | None:
        """Returns what was saved, None if there is no file yet; ``ConfigError`` for another
        one's."""
        try:
            text = self._path.read_text(encoding="utf-8")
            found = json.loads(text, parse_float=_finite, parse_constant=_finite)
            whose = {key: found[key] for key in self._whose}
            state: Mapping[str, Any] = found["state"]
        except (FileNotFoundError, NotADirectoryError):
            if not self._path.parent.is_dir():
                raise ConfigError(
                    f"state: there is no folder {str(self._path.parent)!r}."
                ) from None
            return None
        except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
            raise ConfigError(
                f"{self._path} is not what a choice among drafters has learned ({error}): name "
                "another file."
            ) from error
        if whose == {**self._whose, "models": whose["models"]} != self._whose:
            raise ConfigError(
                f"{self._path} was learned with another target or other draft models, whatever "
                "their folders are called: name another file."
            )
        if whose != self._whose:
            raise ConfigError(
                f"{self._path} is the state of method {whose['method']!r} with the drafters "
                f"{whose['drafters']}, not of {self._whose['method']!r} with "
                f"{self._whose['drafters']}: name another file."
            )
        return state

    @contextmanager
    def read(self) -> Iterator[None]:
        """Within it, a state that is not made as it should be is a ``ConfigError``."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"{self._path} is no state of method {self._whose['method']!r} "
                f"({type(error).__name__}: {error}): remove the file."
            ) from error

    def save(self, state: Mapping[str, Any]) -> None:
        """Replaces the file, whole or not at all. Where that fails, as on a full disk, a warning
        says so once: texts go on, and the next save may succeed."""
        written = False
        try:
            with replacing(self._path) as part:
                part.write_text(json.dumps({**self._whose, "state": dict(state)}), encoding="utf-8")
            written = True
        except OSError as error:
            if not self._warned:
                warnings.warn(f"state: cannot write {self._path} ({error.strerror}).", stacklevel=2)
            self._warned = True
        finally:  # also where Ctrl-C or a full disk came between
            self._unwritten |= not written


def _flush_at_exit(file: weakref.ref[StateFile]) -> None:
    """Has a file written before the program ends, if it is still in use then."""

    def flush() -> None:
        known = file()
        if known is not None:
            known.flush()

    atexit.register(flush)


def _finite(text: str) -> float:
    """Returns the number; ``ValueError`` for one by which nothing could be chosen."""
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text} is no finite number")
    return found


def numbers(state: Mapping[str, Any], name: str, count: int) -> list[float]:
    """Returns one entry of a saved state: n numbers; ``ConfigError`` for anything else."""
    found = state.get(name)
    if not isinstance(found, list) or len(found) != count:
        raise ConfigError(f"the saved state has no {name} for {count} drafters: remove the file.")
    if not all(isinstance(value, (int, float)) for value in found):
        raise ConfigError(f"the saved state's {name} are not numbers: remove the file.")
    return [float(value) for value in found]
