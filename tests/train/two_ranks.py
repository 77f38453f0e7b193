"""Two processes that train together: ``main(folder)``, in which ``asked.json`` holds
``{name: arguments of outpace}``. Each rank writes ``rank0.json`` or ``rank1.json``:
``{name: [exit code, what it said]}``, what it found of a few tensors, and how many numbers it has
held of targets that are split.

The processes are forked here, once everything is imported: torchrun starts them in the same way as
far as they can see, but each of them would import torch again.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.tensor import DTensor

import outpace.llm
import outpace.train.answers
import outpace.train.distributed
import outpace.train.run
from outpace.cli.main import app
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.train.distributed import Ranks
from processes import free_port

TESTS = Path(__file__).resolve().parents[1]
COUNT = 2
WORDS, EACH = 1800, 60
"""Words that are learned from, and those of each text."""
BROKEN = "broken"
"""The last of what is asked: the first rank's disk is full."""


def write_text(file: Path) -> None:
    """Writes texts of random words."""
    drawn = torch.randint(20, (WORDS,), generator=torch.Generator().manual_seed(0)).tolist()
    words = [f"w{number}" for number in drawn]
    texts = [" ".join(words[at : at + EACH]) for at in range(0, WORDS, EACH)]
    file.write_text("\n<|endoftext|>\n".join(texts))


def run_both(folder: Path, commands: dict[str, list[str]]) -> None:
    """Runs the commands in two processes together, and returns when both have ended."""
    (folder / "asked.json").write_text(json.dumps(commands))
    command = [sys.executable, "-m", "train.two_ranks", folder.resolve()]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=TESTS, env=environment, check=True, timeout=170)


def said_by(rank: int, folder: Path) -> dict[str, Any]:
    """Returns what a rank has written."""
    found: dict[str, Any] = json.loads((folder / f"rank{rank}.json").read_text())
    return found


def outpace_said(arguments: list[str]) -> tuple[int, str]:
    """Runs the command line, and returns how it ended and what it said."""
    said = io.StringIO()
    with redirect_stderr(said):
        try:
            app(arguments)
        except SystemExit as ended:
            return int(ended.code or 0), said.getvalue()
    return 0, said.getvalue()


def full_disk(*_: object) -> None:
    raise RuntimeError("No space left on device")


def found(ranks: Ranks) -> dict[str, Any]:
    """What this rank finds by each of the methods that send something."""
    number = ranks.number
    weights = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(1, dtype=torch.float64))]
    weights[0].grad = torch.full((2, 3), float(number))
    if number:
        weights[1].grad = torch.full((1,), 5.0, dtype=torch.float64)
    ranks.average([*weights, nn.Parameter(torch.zeros(1), requires_grad=False)])
    gradients = [each.grad.flatten().tolist() for each in weights if each.grad is not None]
    layer = nn.Linear(2, 2)
    nn.init.constant_(layer.weight, number)
    before = ranks.same_weights(layer)
    ranks.broadcast(layer)
    return {
        "gradients": gradients,
        "mean": ranks.mean(float(number)),
        "any": [ranks.any(number == 1), ranks.any(False)],
        "largest": ranks.largest([number, 2] if number else []),
        "same": [ranks.same("x"), ranks.same(f"x{number}"), before, ranks.same_weights(layer)],
        "gathered": [gathered(ranks, rows).tolist() for rows in (1, 5)],
    }


def gathered(ranks: Ranks, rows: int) -> torch.Tensor:
    """Rows of a place with two depths, in batches of two: rank 1 has no batch of a single row."""
    batches = torch.split(torch.arange(rows), 2)
    mine = [torch.stack([each > 2, each % 2 == 0], -1)[:, None] for each in ranks.turns(batches)]
    return ranks.gathered(batches, mine)[:, 0]


def noting(held: list[int]) -> None:
    """Has noted from now on how many numbers this rank holds of each target that is split."""
    load = outpace.train.distributed.load_sharded

    def noted(*args: Any, **options: Any) -> LoadedModel:
        loaded = load(*args, **options)
        weights = [each.data for each in loaded.model.parameters()]
        mine = [each.to_local() if isinstance(each, DTensor) else each for each in weights]
        held.append(sum(each.numel() for each in mine))
        return loaded

    outpace.train.distributed.load_sharded = noted


def rank(number: int, folder: Path, asked: dict[str, list[str]], ports: list[int]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(COUNT)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(ports[0])}
    report: dict[str, Any] = {}
    ranks = Ranks(number, COUNT)
    held: list[int] = []
    noting(held)
    with ranks.joined("cpu"):
        report["found"] = found(ranks)
    for port, (name, arguments) in zip(ports[1:], asked.items(), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        if distributed.is_initialized():  # a process that fails ends, outside of tests
            distributed.destroy_process_group()
        if name == BROKEN and number == 0:
            outpace.train.run.torch.save = full_disk  # type: ignore[attr-defined]
        report[name] = outpace_said(arguments)
    report["held"] = dict(zip(asked, held, strict=False))
    (folder / f"rank{number}.json").write_text(json.dumps(report))


def main(folder: str) -> None:
    """Runs what is asked for in a folder in two processes, which are forked here."""
    place = Path(folder)
    wanted = json.loads((place / "asked.json").read_text())
    ports = [free_port() for _ in range(len(wanted) + 1)]
    multiprocessing.start_processes(rank, (place, wanted, ports), nprocs=COUNT, start_method="fork")


if __name__ == "__main__":
    main(sys.argv[1])
