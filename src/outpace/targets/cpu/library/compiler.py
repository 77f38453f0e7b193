"""Finds the C++ compiler of this machine, and runs it."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outpace.targets.cpu.library.processor import this_processor
from outpace.targets.cpu.prebuilt import FLAGS, LEVELS

COMPILERS = ("c++", "g++", "clang++")
"""Names that are looked up where ``CXX`` names none."""

PATIENCE = 120.0
"""Seconds after which a compiler is stopped; compiling takes about ten."""


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
