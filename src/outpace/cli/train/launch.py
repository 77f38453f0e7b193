"""The launch of ``outpace train``, alone or by torchrun as one of several processes, and its output
folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout
from rich.console import Console

from outpace.cli.flags.groups import ModelFlags
from outpace.cli.loading import starting
from outpace.cli.signals import sigterm_as_ctrl_c
from outpace.cli.train.flags import DrafterFlags, OnlineFlags, TextFlags
from outpace.errors import ConfigError

if TYPE_CHECKING:
    from outpace.train.distributed import Ranks

# -- processes -------------------------------------------------------------------------------------

RANK, COUNT, LOCAL = "RANK", "WORLD_SIZE", "LOCAL_RANK"
LAST_PORT = 65535
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
"""What torchrun and `accelerate launch` set for each process that they start."""


@dataclass(frozen=True)
class Launch:
    """Which of several processes this is."""

    number: int = 0
    count: int = 1
    local: int = 0
    """Its number among those of its machine."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launch:
        """Returns what the environment says; ``ConfigError`` where it says one half of it.

        >>> Launch.of({"HOME": "/"}), Launch.of({"WORLD_SIZE": "1"})
        (Launch(number=0, count=1, local=0), Launch(number=0, count=1, local=0))
        """
        if environment.get(COUNT, "1") in ("", "1"):
            return cls()
        missing = [name for name in (RANK, LOCAL, *ADDRESS) if name not in environment]
        whole = (RANK, COUNT, LOCAL, ADDRESS[1])
        numbers = [environment.get(name, "") for name in whole]
        if missing or not all(number.isascii() and number.isdigit() for number in numbers):
            wrong = f"no {missing[0]}" if missing else f"{', '.join(whole)} {numbers}"
            raise ConfigError(
                f"the environment has {COUNT}={environment[COUNT]}, which asks for several "
                f"processes, and {wrong}: start them with torchrun --nproc-per-node=N -m outpace "
                f"train, or unset {COUNT}."
            )
        number, count, local, port = map(int, numbers)
        if port > LAST_PORT:
            raise ConfigError(f"MASTER_PORT={port} is no port: the last one is {LAST_PORT}.")
        if not number < count:
            raise ConfigError(
                f"the environment has {RANK}={number}, which is none of {COUNT}={count} processes: "
                "start them with torchrun --nproc-per-node=N -m outpace train."
            )
        return cls(number, count, local)

    def console(self) -> Console:
        """Returns where the first process says what happens; the others say nothing."""
        return Console(stderr=True, quiet=self.number > 0)

    def stopping(self) -> AbstractContextManager[None]:
        """Within it, SIGTERM keeps what was learned, as Ctrl-C does. Of several processes it ends
        each at once: one that waits for another would not hear it."""
        return sigterm_as_ctrl_c() if self.count == 1 else nullcontext()

    @property
    def ranks(self) -> Ranks:
        """The processes that train together."""
        from outpace.train.distributed import Ranks

        return Ranks(self.number, self.count)

    def check(self, method: str, text: TextFlags, online: OnlineFlags) -> None:
        """Raises ``ConfigError`` for what only one process can do."""
        if self.count == 1:
            return
        from outpace.heads.registry import CLASSIFIERS

        reasons = {
            "--online answers one prompt after another": online.online,
            "--hidden-states keeps to the room that --cache gives one process": text.hidden_states
            is not None,
            f"{method} weighs the tokens of a whole step": method in CLASSIFIERS,
        }
        for reason, found in reasons.items():
            if found:
                remedy = "leave it out, or " if reason.startswith("--hidden-states") else ""
                raise ConfigError(
                    f"{reason}, so that {self.count} processes cannot share it out: {remedy}start "
                    "outpace train without torchrun."
                )

    def check_shards(self, method: str, model: ModelFlags, drafter: DrafterFlags) -> None:
        """Raises ``ConfigError`` for a target that is not to be split, or cannot be."""
        from outpace.targets.hf.loading.source import names_gguf

        pruned = method == "draft_model" and drafter.start in (None, "pruned")
        packed = model.model is not None and names_gguf(model.model)
        sentences = {
            "--shard-target splits the target over several processes, and this is the only one: "
            "start it with torchrun --nproc-per-node=N -m outpace train, or leave it out.": (
                self.count == 1
            ),
            "--shard-target splits plain numbers, and --quantization makes others of them: leave "
            "one of the two out.": model.quantization is not None,
            f"--shard-target splits plain numbers, and {model.model} is a GGUF file, whose weights "
            "are in blocks: name the model's Hugging Face folder.": packed,
            "--shard-target is for a target that one process cannot hold, and a draft_model that "
            "begins with layers of it reads all of them in each: add --start with a folder, or "
            "--start random.": pruned,
        }
        for sentence, wrong in sentences.items():
            if wrong:
                raise ConfigError(sentence)

    def placed(self, model: ModelFlags) -> ModelFlags:
        """Returns the model's flags with a GPU of this process's own, where GPUs are used."""
        if self.count == 1:
            return model
        from outpace.targets.parallel.load import device_of

        return replace(model, device=device_of(model.device, self.local))


# -- the folder that is written to -----------------------------------------------------------------

CONFIG = "config.json"
WEIGHTS = frozenset({".safetensors", ".bin", ".gguf", ".pt", ".pth"})
"""How the names of files with weights end."""
LOCK = ".training.lock"
"""The file in a folder that is locked while a run writes there. The system unlocks it when the
process ends, however it ends."""


@contextmanager
def locked_folders(
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
        from outpace.bench.outputs import check_folder
        from outpace.train.answers import FILE
        from outpace.train.checkpoint import LOG, STATE
        from outpace.train.draft_model import PRUNED, RANDOM
    for text, drafter in runs:
        start = None if drafter.start in (PRUNED, RANDOM) else drafter.start
        _check_apart(drafter.out, {"-m": model.model, "--start": start, "--draft": drafter.draft})
        _check_no_data(drafter.out, text.data or [], {CONFIG, STATE, LOG, FILE})
        _check_no_model(drafter.out, STATE, LOG, online)
        if text.hidden_states is not None:
            check_folder("--hidden-states", text.hidden_states)
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
