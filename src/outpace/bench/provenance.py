"""The provenance of a figure: the command line, versions, hardware and time of its measurement."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import outpace
from outpace.targets.cpu.library.processor import this_processor

PACKAGES = ("torch", "transformers", "openvino", "openvino-genai", "numpy")


def provenance(arguments: Sequence[str] | None = None) -> dict[str, str]:
    """Returns the command line, versions, hardware, threads and time as printable pairs.

    arguments: the command line, the program first; unset: this process's own. The pair "commit" is
    there only where `commit` finds one.
    """
    found = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": printable_command(sys.argv if arguments is None else arguments),
        "outpace": outpace.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu(),
        "instructions": this_processor().instructions,
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "load": load(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    if (own := commit()) is not None:
        found["commit"] = own
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def printable_command(arguments: Sequence[str]) -> str:
    """Returns a command line that a shell reads as these arguments.

    Of every absolute path only the last part is kept, so that a published report does not show
    the folders of the machine it was made on.

    >>> printable_command(["/usr/bin/outpace", "--model", "/home/me/llama", "--llm", '{"a": 1}'])
    'outpace --model llama --llm \\'{"a": 1}\\''

    >>> printable_command(["/venv/lib/outpace/__main__.py", "doctor"])
    'python -m outpace doctor'
    """
    program, given = [], list(arguments)
    if given and Path(given[0]).name == "__main__.py":
        program, given = ["python", "-m", Path(given[0]).parent.name], given[1:]
    return shlex.join([*program, *map(_without_folders, given)])


def _without_folders(argument: str) -> str:
    """Returns an argument with its absolute paths cut, also after ``--flag=`` and inside JSON."""
    flag, equals, value = argument.partition("=")
    if equals and flag.startswith("-"):
        return f"{flag}={_without_folders(value)}"
    if argument.startswith("{"):
        try:
            return json.dumps(_cut(json.loads(argument)), ensure_ascii=False)
        except ValueError:
            return argument
    return _last_part(argument)


def _cut(value: Any) -> Any:
    """Returns a JSON value with the absolute paths in its strings cut."""
    if isinstance(value, dict):
        return {key: _cut(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cut(item) for item in value]
    return _last_part(value) if isinstance(value, str) else value


def _last_part(text: str) -> str:
    """Returns a text, or several with commas between them, with the absolute paths cut."""
    return ",".join(
        Path(part).name if Path(part).is_absolute() or part.startswith("~") else part
        for part in text.split(",")
    )


def commit(package: Path | None = None) -> str | None:
    """Returns the commit that outpace runs from, with "+" where its files were changed.

    package: the folder of the installed package; unset: that of this process. None where the
    package does not lie in a git checkout of outpace itself: a copy inside another project's
    checkout, such as in a virtual environment there, has no commit of its own.
    """
    folder = (package or Path(outpace.__file__).parent).resolve()
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() / "src" / "outpace" != folder:
        return None
    return _git(folder, "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """Returns what git prints, None where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def cpu() -> str:
    """Returns the processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def load() -> str:
    """Returns the machine's load average of the last minute: figures from a busy machine mean
    little."""
    try:
        return f"{os.getloadavg()[0]:.2f}"
    except OSError:
        return "unknown"
