"""The folder that a drafter is written to: whether it can be, whether a model would be lost, and
whether another run writes there already."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from outpace.cli.flags.groups import ModelFlags
from outpace.cli.loading import starting
from outpace.cli.training.flags import DrafterFlags, TextFlags
from outpace.errors import ConfigError

CONFIG = "config.json"
WEIGHTS = frozenset({".safetensors", ".bin", ".gguf", ".pt", ".pth"})
"""How the names of files with weights end."""
LOCK = ".training.lock"
"""The file in a folder that is locked while a run writes there. The system unlocks it when the
process ends, however it ends."""


@contextmanager
def taken(
    console: Console,
    model: ModelFlags,
    out: Path,
    runs: Sequence[tuple[TextFlags, DrafterFlags]],
    *,
    online: bool = False,
    first: bool = True,
) -> Iterator[None]:
    """Within it, the folders of these runs are written by this command alone.

    Raises ``ConfigError`` for a folder that cannot be written to, before hours are spent, for one
    in which a model would be overwritten, and for one in which another command trains. out: the
    folder of the whole command; the runs may be in folders of it. online: a drafter that learns
    online goes on with no earlier run: for it each model counts. first: whether this process is
    the one that writes, of those that train together.
    """
    with starting(console):
        from outpace.bench.report.outputs import check_folder
        from outpace.train.answers import FILE
        from outpace.train.draft_model import PRUNED, RANDOM
        from outpace.train.run import LOG, STATE
    for text, drafter in runs:
        start = None if drafter.start in (PRUNED, RANDOM) else drafter.start
        _check_apart(drafter.out, {"-m": model.model, "--start": start, "--draft": drafter.draft})
        _check_no_data(drafter.out, text.data or [], {CONFIG, STATE, LOG, FILE})
        _check_no_model(drafter.out, STATE, LOG, online)
        if text.lessons is not None:
            check_folder("--lessons", text.lessons)
    with ExitStack() as locks:
        for folder in dict.fromkeys([out, *(drafter.out for _, drafter in runs)]):
            check_folder("--out", folder)
            if first:
                _lock(locks, folder)
        for _, drafter in runs:  # once more: another run may have written and ended meanwhile
            _check_no_model(drafter.out, STATE, LOG, online)
        yield


def _lock(locks: ExitStack, folder: Path) -> None:
    """Locks a folder until the stack is closed; ``ConfigError`` where another process has it."""
    try:
        locks.enter_context(FileLock(folder / LOCK, timeout=0))
    except Timeout:
        raise ConfigError(
            f"--out: another outpace train is writing into {folder}: wait until it has ended, or "
            "name another folder."
        ) from None


def _check_apart(out: Path, read: dict[str, str | None]) -> None:
    """Raises ``ConfigError`` where a model is read from the folder. read: by flag."""
    for flag, name in read.items():
        if name is not None and os.path.exists(name) and out.exists() and out.samefile(name):
            raise ConfigError(
                f"--out is the folder of {flag}, whose model would be overwritten: name another "
                "folder."
            )


def _check_no_data(out: Path, data: Iterable[str | Path], written: Collection[str]) -> None:
    """Raises ``ConfigError`` for text in the folder itself that has the name of a file which the
    run writes. written: their names."""
    for file in map(Path, data):
        there = out.is_dir() and file.parent.exists() and file.parent.samefile(out)
        if there and file.name in written:
            raise ConfigError(
                f"--out: {out} holds {file.name}, which is to be read, and the run would write "
                "into it: name another folder."
            )


def _check_no_model(out: Path, state: str, log: str, online: bool) -> None:
    """Raises ``ConfigError`` for a folder with a model in it, unless an earlier run wrote it, which
    goes on, or begins anew where it was killed before it had a state. state, log: the files that
    runs leave; the log is there first, and empty until there is a state."""
    killed = (out / log).is_file() and not (out / log).stat().st_size
    goes_on = not online and ((out / state).exists() or killed)
    if not out.is_dir() or goes_on:
        return
    files = sorted(file.name for file in out.iterdir())
    found = [name for name in files if name == CONFIG or Path(name).suffix in WEIGHTS]
    if found:
        raise ConfigError(
            f"--out: {out} holds a model ({found[0]}), and no run that could go on here: name "
            "another folder, or move that model away."
        )
