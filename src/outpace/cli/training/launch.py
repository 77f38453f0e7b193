"""How ``outpace train`` was started: alone, or by torchrun as one of several processes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console

from outpace.cli.flags.groups import ModelFlags
from outpace.cli.termination import sigterm_as_ctrl_c
from outpace.cli.training.flags import DrafterFlags, OnlineFlags, TextFlags
from outpace.errors import ConfigError

if TYPE_CHECKING:
    from outpace.train.ranks import Ranks

RANK, COUNT, LOCAL = "RANK", "WORLD_SIZE", "LOCAL_RANK"
LAST_PORT = 65535
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
"""What torchrun and `accelerate launch` tell each process that they start."""


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
        """Returns where a user is told what happens: by the first process, not by all at once."""
        return Console(stderr=True, quiet=self.number > 0)

    def stopping(self) -> AbstractContextManager[None]:
        """Within it, SIGTERM keeps what was learned, as Ctrl-C does. Of several processes it ends
        each at once: one that waits for another would not hear it."""
        return sigterm_as_ctrl_c() if self.count == 1 else nullcontext()

    @property
    def ranks(self) -> Ranks:
        """The processes that train together."""
        from outpace.train.ranks import Ranks

        return Ranks(self.number, self.count)

    def check(self, method: str, text: TextFlags, online: OnlineFlags) -> None:
        """Raises ``ConfigError`` for what only one process can do."""
        if self.count == 1:
            return
        from outpace.heads.registry import classifier_names

        reasons = {
            "--online answers one prompt after another": online.online,
            "--lessons keeps to the room that --cache gives one process": text.lessons is not None,
            f"{method} weighs the tokens of a whole step": method in classifier_names(),
        }
        for reason, found in reasons.items():
            if found:
                remedy = "leave it out, or " if reason.startswith("--lessons") else ""
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
        from outpace.train.ranks import device_of

        return replace(model, device=device_of(model.device, self.local))
