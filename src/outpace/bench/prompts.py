"""What to generate from: prompt files of several formats, named sets, and a small built-in one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from outpace.bench.builtin import BUILT_IN
from outpace.errors import PromptError, did_you_mean

DATA = "OUTPACE_DATA"
"""Environment variable with the folder that named sets are read from."""

NAMES = {
    "specbench": "specbench_open",
    "humaneval": "humaneval",
    "mbpp": "mbpp_test",
    "gsm8k": "gsm8k_test",
    "mt_bench": "mt_bench",
    "fairytaleqa": "fairytaleqa_test",
    "oasst": "oasst_prompts",
    "selfinstruct": "selfinstruct_user",
    "indomain": "indomain_text",
    "dialogue": "indomain_dialogue",
}


@dataclass(frozen=True)
class Prompt:
    """One prompt: the first turn where a file has several."""

    id: str
    task: str
    text: str


def read_prompts(name: str, data: str | Path | None = None) -> list[Prompt]:
    """Returns the prompts of a file, of a named set in the data folder, or "builtin".

    Raises ``PromptError`` with what there is.
    """
    if name == "builtin":
        return [Prompt(*entry) for entry in BUILT_IN]
    path = Path(name)
    if not path.suffix:
        path = _named(name, data)
    if not path.exists():
        raise PromptError(f"no prompt file {path}: name a .jsonl file, or one of {_known()}.")
    # Not splitlines(), which also breaks lines at U+2028, a character that JSON texts may hold.
    lines = enumerate(_text(path).split("\n"), 1)
    entries = [_entry(path, number, line) for number, line in lines if line.strip()]
    found = [prompt for prompt in entries if prompt.text]
    if not found:
        raise PromptError(f"{path} holds no prompt.")
    return found


def _named(name: str, data: str | Path | None) -> Path:
    folder = data or os.environ.get(DATA)
    if name not in NAMES:
        raise PromptError(f"unknown prompt set {name!r}{did_you_mean(name, [*NAMES, 'builtin'])}.")
    if folder is None:
        raise PromptError(
            f"prompt set {name!r} needs a folder: give --data or set {DATA}, or use 'builtin'."
        )
    file = f"{NAMES[name]}.jsonl"
    below = Path(folder) / "prompts" / file
    return below if below.exists() else Path(folder) / file


def _known() -> str:
    return ", ".join(["builtin", *NAMES])


def _text(path: Path) -> str:
    """Returns the content of a file; ``PromptError`` if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset "
            f"{error.start} cannot be read; save it as UTF-8."
        ) from error
    except OSError as error:
        raise PromptError(f"cannot read prompt file {str(path)!r}: {error.strerror}.") from error


def _entry(path: Path, number: int, line: str) -> Prompt:
    try:
        found = prompt_of(json.loads(line), f"{path.stem}/{number}", path.stem)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise PromptError(
            f"{path}, line {number} is no prompt: it needs 'prompt', or 'question_id' and 'turns'."
        ) from error
    if not isinstance(found.text, str):
        raise PromptError(f"{path}, line {number}: the prompt must be a text, not {found.text!r}.")
    return found


def prompt_of(entry: dict[str, Any], default_id: str, default_task: str) -> Prompt:
    """Returns the prompt of one line: ours (``prompt``) or Spec-Bench's (``turns``)."""
    if "prompt" in entry:
        return Prompt(
            str(entry.get("id", default_id)), str(entry.get("task", default_task)), entry["prompt"]
        )
    return Prompt(
        str(entry["question_id"]), str(entry.get("category", default_task)), entry["turns"][0]
    )


def chosen(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """Returns ``count`` prompts, as evenly from all tasks as it goes, in a fixed order."""
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    mixed = [p for turn in zip_longest(*by_task.values()) for p in turn if p is not None]
    return mixed[:count]


def batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Returns full batches of one task where possible; the last one is filled from the start.

    >>> [[p.id for p in b] for b in batches([Prompt(i, "t", "x") for i in "abc"], 2)]
    [['a', 'b'], ['c', 'a']]
    """
    if size > len(prompts):
        raise PromptError(
            f"a batch of {size} needs at least that many prompts, not {len(prompts)}."
        )
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    sorted_by_task = sorted(prompts, key=lambda prompt: tasks.index(prompt.task))
    found = [sorted_by_task[i : i + size] for i in range(0, len(prompts), size)]
    found[-1] += sorted_by_task[: size - len(found[-1])]
    return found


def task_of(batch: Iterable[Prompt]) -> str:
    """Returns the task that all prompts of a batch share, or "mixed"."""
    tasks = {prompt.task for prompt in batch}
    return tasks.pop() if len(tasks) == 1 else "mixed"
