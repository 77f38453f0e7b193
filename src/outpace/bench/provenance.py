"""Where and with what a figure was measured."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("outpace", "torch", "transformers", "openvino", "openvino-genai", "numpy")


def provenance(command: Sequence[str] | None = None) -> dict[str, str]:
    """Returns versions, commit, hardware, threads, command line and time as printable pairs.

    Paths in the command line are cut to their last part: a report tells nobody's folders.
    """
    found = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(map(_last_part, sys.argv if command is None else command)),
        "commit": commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu(),
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "load": load(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _last_part(argument: str) -> str:
    return Path(argument).name if argument.startswith(("/", "~")) else argument


def commit() -> str:
    """Returns the commit of the source tree, "+" where it was changed; "unknown" outside of git."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
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
    """Returns how busy the machine was: a figure from a busy one is no figure."""
    try:
        return f"{os.getloadavg()[0]:.2f}"
    except OSError:
        return "unknown"
