"""How fast this tree is beside an earlier commit, on one machine, in turns.

Each turn is a process of its own (`turn.py`) that imports outpace, loads, and writes texts. The
turns of a block are a palindrome, such as old, new, control, control, new, old, so that a machine
that becomes slower on the way favours nobody; the next block begins with another. "control" is the
old commit once more: its ratio to the old one shows what the same code differs by here.

A ratio is old seconds / new seconds, above 1 where the new one is faster: the geometric mean of
the blocks, with Student's 95 % interval of their logarithms. Texts are greedy; where both write
other texts, their times say less, and it is said.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scipy import stats

TREE = Path(__file__).parents[1]
TURN = Path(__file__).with_name("turn.py")
BASE = "3a140bc8"
METHODS = ("plain", "suffix", "draft_model", "auto")
OLD, NEW, CONTROL = ARMS = ("old", "new", "control")
STORIES = (
    "Once upon a time, there was a little girl named Lily. She had a red ball.",
    "Tom and his dog went to the park. They saw a big tree. In the tree",
    "One day, a small bird could not fly. The bird was sad. Its mom said,",
)
CODE = (
    "def quicksort(items):\n    ",
    "class Account:\n    def __init__(self, owner, balance=0):\n        self.owner = owner\n"
    "        self.balance = balance\n\n    def deposit(self, amount):\n",
    "import csv\n\ndef read_rows(path):\n    with open(path) as file:\n"
    "        return list(csv.DictReader(file))\n\ndef write_rows(path, rows):\n",
)
Turn = Mapping[str, Any]
"""What `turn.py` prints: "seconds" by what was measured, and the "ids" of the texts."""


def main() -> None:
    asked = _parser().parse_args()
    print(f"{processor()}; {os.getloadavg()[0]:.1f} processes ran when it began")
    with worktree(asked.base) as old:
        sources = {OLD: old / "src", NEW: TREE / "src", CONTROL: old / "src"}
        job = {"pairs": pairs(asked), "methods": asked.methods, "tokens": asked.tokens}
        arms = [arm for arm in ARMS if arm != CONTROL or not asked.no_control]
        for arm in (OLD, NEW):  # compiles kernels, and brings files into memory
            play(arm, sources[arm], job)
        blocks = [_block(order(arms, at), sources, job, at) for at in range(asked.blocks)]
    for line in report(blocks, arms):
        print(line)
    if asked.json is not None:
        about = {"processor": processor(), "base": asked.base, "job": job, "blocks": blocks}
        asked.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument(
        "--base", default=BASE, metavar="COMMIT", help="the old commit (%(default)s)"
    )
    parser.add_argument("--target", metavar="MODEL", help="a real pair, after the bundled one")
    parser.add_argument("--draft", metavar="MODEL")
    parser.add_argument("--no-bundled", action="store_true", help="the real pair alone")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each text")
    parser.add_argument("--blocks", type=int, default=6, metavar="N")
    parser.add_argument("--no-control", action="store_true", help="old, new, new, old")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all times are kept, too")
    return parser


def pairs(asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns the pairs to measure, by name; ends the program where a real one is incomplete."""
    found = {}
    if not asked.no_bundled:
        found["bundled"] = {"target": None, "draft": None, "prompts": STORIES}
    if asked.target is not None:
        if asked.draft is None:
            sys.exit("--target comes with --draft.")
        target, draft = (str(Path(each).expanduser()) for each in (asked.target, asked.draft))
        found["real"] = {"target": target, "draft": draft, "prompts": CODE}
    if not found:
        sys.exit("--no-bundled leaves nothing to measure without --target and --draft.")
    return found


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Returns a context with a checkout of a commit, which is removed at its end."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "old"
        git = ["git", "-C", str(TREE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(place), commit], check=True)
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True)


# -- turns -------------------------------------------------------------------------------------


def order(arms: Sequence[str], block: int) -> list[str]:
    """Returns the turns of a block: a palindrome that begins with another arm each time.

    >>> order(["old", "new"], 0), order(["old", "new"], 1)
    (['old', 'new', 'new', 'old'], ['new', 'old', 'old', 'new'])
    """
    first = block % len(arms)
    half = [*arms[first:], *arms[:first]]
    return [*half, *reversed(half)]


def _block(
    turns: Sequence[str], sources: Mapping[str, Path], job: Mapping[str, Any], number: int
) -> dict[str, list[Turn]]:
    found: dict[str, list[Turn]] = {}
    for arm in turns:
        found.setdefault(arm, []).append(play(arm, sources[arm], job))
        whole = sum(found[arm][-1]["seconds"].values())
        print(f"block {number + 1}, {arm}: {whole:.1f} s", file=sys.stderr, flush=True)
    return found


def play(arm: str, source: Path, job: Mapping[str, Any]) -> Turn:
    """Returns what one turn prints; ends the program where it fails."""
    command = [sys.executable, str(TURN), json.dumps({"source": str(source), **job})]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"a turn of the {arm} tree has failed:\n{done.stderr}")
    turn: Turn = json.loads(done.stdout.splitlines()[-1])
    return turn


# -- the report --------------------------------------------------------------------------------


def report(blocks: Sequence[Mapping[str, Sequence[Turn]]], arms: Sequence[str]) -> Iterator[str]:
    """Yields a table with a line for each thing that was measured, and whether texts differ."""
    yield "| | old, s | new, s | old / new | control |\n|---|---|---|---|---|"
    for what in blocks[0][OLD][0]["seconds"]:
        old, new = (
            statistics.median(t["seconds"][what] for b in blocks for t in b[arm])
            for arm in (OLD, NEW)
        )
        control = ratio(blocks, what, CONTROL) if CONTROL in arms else ""
        yield f"| {what} | {old:.3f} | {new:.3f} | {ratio(blocks, what, NEW)} | {control} |"
    for what, texts in blocks[0][OLD][0]["ids"].items():
        others = [t["ids"][what] for b in blocks for t in b[NEW]]
        same = sum(one == another for o in others for one, another in zip(texts, o, strict=True))
        if same < len(texts) * len(others):
            yield f"{what}: {same} of {len(texts) * len(others)} texts are the old ones"


def ratio(blocks: Sequence[Mapping[str, Sequence[Turn]]], what: str, arm: str) -> str:
    """Returns how much faster an arm was than the old one, with the interval of that."""
    logs = [
        statistics.mean(math.log(t["seconds"][what]) for t in block[OLD])
        - statistics.mean(math.log(t["seconds"][what]) for t in block[arm])
        for block in blocks
    ]
    middle = statistics.mean(logs)
    if len(logs) < 2:
        return f"{math.exp(middle):.3f}"
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    reach = float(stats.t.ppf(0.975, len(logs) - 1)) * error
    low, high = math.exp(middle - reach), math.exp(middle + reach)
    return f"{math.exp(middle):.3f} [{low:.3f}, {high:.3f}]"


def processor() -> str:
    """Returns the processor's name, its strongest instructions, and how many cores are ours."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    about = dict(
        reversed([[p.strip() for p in line.split(":", 1)] for line in lines if ":" in line])
    )
    flags = about.get("flags", "").split()
    sets = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
    strongest = next((name for flag, name in sets.items() if flag in flags), platform.machine())
    name = about.get("model name", platform.processor())
    numbers = f"family {about.get('cpu family')}, model {about.get('model')}"
    return f"{name} ({numbers}; {strongest}), {len(os.sched_getaffinity(0))} cores"


if __name__ == "__main__":
    main()
