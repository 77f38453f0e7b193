"""Compiles our own code with the C++ compiler of this machine, and keeps what was compiled."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep, time

from outpace.errors import ConfigError
from outpace.targets.cpu import prebuilt
from outpace.targets.cpu.library.processor import this_processor
from outpace.targets.cpu.prebuilt import FLAGS, LEVELS

COMPILERS = ("c++", "g++", "clang++")
"""Names that are looked up where ``CXX`` names none."""

PATIENCE = 300.0
"""Seconds after which a compiler is stopped. Compiling our kernels takes 43 on two slow cores, and
several times that next to other work."""


class CompilerError(Exception):
    """Why nothing could be compiled, in one line."""


@dataclass(frozen=True)
class Compiler:
    """A compiler, and what it is to do with every source."""

    command: tuple[str, ...]
    """Its path and its arguments, all but the source and the output."""
    version: bytes
    """What it says about itself."""

    @property
    def identity(self) -> bytes:
        """Bytes that differ where the machine code that it makes may differ."""
        return b"\0".join(
            (this_processor().identity, *map(os.fsencode, self.command), self.version)
        )

    def compile(self, source: Path, output: Path) -> None:
        """Writes the shared library of a source. Raises `CompilerError`.

        output: a path in a folder of one's own, in which the compiler keeps its own files too.
        """
        ran = _run([*self.command, str(source), "-o", str(output)], output.parent)
        if ran.returncode:
            raise CompilerError(f"{self.command[0]} failed: {_first_error(ran)}")
        if not output.is_file():
            raise CompilerError(f"{self.command[0]} ended well and wrote no library")


def find_compiler() -> Compiler:
    """Returns the compiler that ``CXX`` names, or the usual one. Raises `CompilerError`.

    ``CXX`` may have several words, as in "ccache g++".
    """
    words = _asked(os.environ.get("CXX", ""))
    names = [words[0]] if words else COMPILERS
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        where = f"CXX names {words[0]!r}, which" if words else "a C++ compiler (g++ or clang++)"
        raise CompilerError(f"{where} is not found")
    command = [path, *words[1:]]
    asked = _run([*command, "--version"])
    if asked.returncode:
        raise CompilerError(f"{shlex.join(command)} --version failed: {_first_error(asked)}")
    return Compiler((*command, *FLAGS, *_target()), asked.stdout)


def kernels_found() -> str:
    """Returns which of our kernels models on the CPU will get, in words. Nothing is compiled."""
    try:
        carried = prebuilt.find(this_processor().flags)
        if carried is not None:
            return (
                f"compiled with this package ({carried.name.split('-', 1)[1].rpartition('-')[0]})"
            )
        return f"compiled by {find_compiler().command[0]} when a model is loaded first"
    except (CompilerError, ConfigError) as error:
        return f"none, because {error}: install a C++ compiler (such as g++), or name one in CXX"


def _target() -> tuple[str, ...]:
    """What the compiler makes code for: this very processor, or the level to which it is
    lowered."""
    level = this_processor().level
    if level is not None:
        return LEVELS[level][0]
    known = platform.machine() in ("x86_64", "AMD64", "i686")
    return ("-march=native",) if known else ("-mcpu=native",)


def _asked(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise CompilerError(f"CXX={text!r} cannot be read: {error}") from error


def _run(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """Runs a command to its end, in a process group that is stopped as a whole: compilers start
    other programs, which would otherwise work on. folder: for temporary files."""
    places = {} if folder is None else {"TMPDIR": str(folder)}
    try:
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **places},
            start_new_session=True,
        )
    except OSError as error:
        raise CompilerError(f"{command[0]} cannot be run: {error.strerror}") from error
    try:
        out, err = running.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise CompilerError(f"{command[0]} took more than {PATIENCE:g} seconds") from error
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
    return subprocess.CompletedProcess(command, running.returncode, out, err)


def _first_error(ran: subprocess.CompletedProcess[bytes]) -> str:
    lines = [line.strip() for line in ran.stderr.decode(errors="replace").splitlines()]
    said = next((line for line in lines if "error" in line.lower()), None)
    said = said or next(filter(None, lines), None)
    if said is None and ran.returncode < 0:
        return f"it was ended by signal {-ran.returncode}"
    return (said or f"it ended with status {ran.returncode} and said nothing")[:300]


# -- compiled libraries in the user's cache folder -------------------------------------------------


LOGGER = logging.getLogger("outpace")

OTHERS = stat.S_IWGRP | stat.S_IWOTH
"""Permissions to write that others than the owner may have."""

STALE_SECONDS = 3600.0
"""Age from which on temporary files, of whichever process, are leftovers of one that was killed."""

Make = Callable[[Path], None]
"""Writes the library to a path. May raise anything."""


class NotTrusted(OSError):
    """Why libraries cannot be kept in a folder."""


def cache_folders() -> Iterator[Path]:
    """Yields the folders that may keep libraries, the best one first.

    The last one lies below the temporary folder, for users without a home that can be written to.
    """
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The standard says to ignore relative paths: they would lead into the working folder.
    if asked.is_absolute():
        yield asked / "outpace"
    else:
        try:
            home = Path.home()
        except RuntimeError:  # neither HOME nor an entry in the table of users
            home = Path()
        if home.is_absolute():
            yield home.joinpath(*_CACHES) / "outpace"
    yield Path(tempfile.gettempdir()).absolute() / f"outpace-{os.getuid()}"


_CACHES = ("Library", "Caches") if sys.platform == "darwin" else (".cache",)


class LibraryCache:
    """One folder of libraries."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if there is none.

        Raises `NotTrusted` where others could write to it, ``OSError`` where it cannot be made.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder.resolve(strict=True)
        _check(self.folder)
        for parent in self.folder.parents:
            mode = parent.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise NotTrusted(f"everybody may replace what is in {parent}")

    def find(self, key: str) -> Path | None:
        """Returns the library that was kept for a key, if it is there and whole.

        Files that are not what was kept are removed.
        """
        for kept in sorted(self.folder.glob(f"{key}-*.so")):
            try:
                _check(kept)
                if kept.name == _name(key, kept):
                    return kept
                LOGGER.info("%s is damaged and is made again", kept)
            except NotTrusted as error:
                LOGGER.warning("outpace does not load %s: %s", kept, error)
            kept.unlink(missing_ok=True)
        return None

    def find_or_make(self, key: str, make: Make, patience: float) -> Path:
        """Returns the library of a key, made if it is not there.

        patience: seconds to wait for another process that is making it, then ``TimeoutError``.
        """
        found = self.find(key)
        if found is not None:
            return found
        with self._lock(key, patience):
            # Another process may have made it meanwhile.
            return self.find(key) or self._make(key, make)

    def _make(self, key: str, make: Make) -> Path:
        self._sweep(key)
        working = Path(tempfile.mkdtemp(prefix=f"{key}.", suffix=".tmp", dir=self.folder))
        try:
            made = working / "made.so"
            make(made)
            made.chmod(0o700)
            kept = self.folder / _name(key, made)
            os.replace(made, kept)  # at once: no process ever sees half of it under this name
        finally:
            shutil.rmtree(working, ignore_errors=True)
        return kept

    def _sweep(self, key: str) -> None:
        """Removes what killed processes have left behind.

        Temporary folders of this key are leftovers in any case, because this process has its lock.
        """
        now = time()
        for left in self.folder.glob("*.tmp"):
            with suppress(FileNotFoundError):  # one of another key, whose process has just ended
                if left.name.startswith(f"{key}.") or now - left.lstat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)

    @contextmanager
    def _lock(self, key: str, patience: float) -> Iterator[None]:
        """Holds the lock of a key, which the system releases however this process ends."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self.folder / f"{key}.lock", flags, 0o600)
        try:
            until = monotonic() + patience
            while not _locked(lock):
                if monotonic() > until:
                    raise TimeoutError(f"another process has held {key}.lock for {patience:g} s")
                sleep(0.05)
            yield
        finally:
            os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check(path: Path) -> None:
    """Raises `NotTrusted` unless only this user or root can write to a file or folder."""
    found = path.lstat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise NotTrusted(f"{path} is neither a file nor a folder")
    if found.st_uid not in (os.getuid(), 0):
        raise NotTrusted(f"{path} belongs to another user (uid {found.st_uid})")
    if found.st_mode & OTHERS:
        raise NotTrusted(f"others may write to {path} (mode {stat.S_IMODE(found.st_mode):o})")


def _name(key: str, library: Path) -> str:
    """Returns the name under which a library is kept for a key."""
    return f"{key}-{hashlib.sha256(library.read_bytes()).hexdigest()[:32]}.so"
