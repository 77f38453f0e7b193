"""The prompts of a benchmark: files of two formats, named sets, and sets that come along."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from outpace.bench.builtin import BUILT_IN, CHATS, FURTHER, FURTHER_CHATS
from outpace.core.unicode import check_unicode
from outpace.core.values import shown
from outpace.errors import PromptError, did_you_mean
from outpace.files import PROMPT, Record, no_prompt, read_text, records

DATA = "OUTPACE_DATA"
"""Environment variable with the folder that named sets are read from."""

SETS = Path(__file__).with_name("sets")
"""The folder of the sets that come with the package."""

PACKAGED = ("editing",)

BUILT_IN_SETS = {"builtin": BUILT_IN, "chat": CHATS}

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


KNOWN = (*BUILT_IN_SETS, *PACKAGED, *NAMES)
"""The names of all sets."""


@dataclass(frozen=True)
class Prompt:
    """One prompt; of a question with several turns, the first turn."""

    id: str
    task: str
    text: str


def _listed(names: str) -> list[str]:
    listed = [name.strip() for name in names.split(",") if name.strip()]
    return listed if listed and not _exists(Path(names)) else [names]  # a name may have a comma


def files_of(names: str) -> list[Path]:
    """Returns the files among the sets that `read_sets` reads, but for those in its folder."""
    return [Path(name) for name in _listed(names) if Path(name).is_file()]


def read_sets(names: str, data: str | Path | None = None) -> list[Prompt]:
    """Returns the prompts of one or several sets with commas between their names, as `read_prompts`
    does.

    A prompt that comes again, in the same set or in a later one, is left out, as Spec-Bench holds
    those of MT-bench: a drafter that remembers texts would find the very answer.
    """
    listed = _listed(names)
    found: dict[str, Prompt] = {}
    for name in listed:
        for prompt in read_prompts(name, data):
            found.setdefault(prompt.text, prompt)
    return list(found.values())


def read_prompts(name: str, data: str | Path | None = None) -> list[Prompt]:
    """Returns the prompts of a .jsonl or .json file, of a named set in the data folder, or of a set
    that comes with the package: "builtin", texts to continue; "chat", questions for instruct
    models; "editing", changes to make in given code.

    data: the folder of the named sets; unset: the one that the variable OUTPACE_DATA names.
    Raises ``PromptError`` for a file or a set that is missing, unreadable or empty.
    """
    if name in BUILT_IN_SETS:
        return [Prompt(*entry) for entry in BUILT_IN_SETS[name]]
    path = Path(name)
    may_be_set = path.name == name and not path.suffix
    if may_be_set and (name in KNOWN or not _exists(path)):
        path = _named(name, data)
    if not _exists(path):
        raise PromptError(
            f"there is no prompt file {shown(str(path))}: name a .jsonl or .json file, or one of "
            f"{_known()}."
        )
    # Lines end at line breaks only: JSON may hold other separators of Unicode in its strings.
    lines = read_text(path, "prompt file").split("\n")
    entries = [_entry(path, record) for record in records(lines, path, PROMPT)]
    found = [prompt for prompt in entries if prompt.text]
    if not found:
        raise no_prompt(path)
    return found


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no name that a file could have, such as a whole prompt
        return False


def _named(name: str, data: str | Path | None) -> Path:
    folder = data or os.environ.get(DATA)
    if name in PACKAGED:
        return SETS / f"{name}.jsonl"
    if name not in NAMES:
        raise PromptError(f"unknown prompt set {shown(name)}{did_you_mean(name, KNOWN)}.")
    if folder is None:
        raise PromptError(
            f"prompt set {name!r} needs a folder: give --data or set {DATA}, or use a set that "
            f"comes with the package: {', '.join((*BUILT_IN_SETS, *PACKAGED))}."
        )
    file = f"{NAMES[name]}.jsonl"
    below = Path(folder) / "prompts" / file
    return below if below.exists() else Path(folder) / file


def _known() -> str:
    return ", ".join(KNOWN)


def _entry(path: Path, record: Record) -> Prompt:
    try:
        if not isinstance(record.value, dict):
            raise TypeError(f"a JSON object was expected, not {record.value!r}")
        prompt = prompt_of(record.value, f"{path.stem}/{record.number}", path.stem)
    except (KeyError, TypeError, IndexError) as error:
        raise PromptError(
            f"{record.where} is no prompt: it needs 'prompt', or 'question_id' and 'turns'."
        ) from error
    if not isinstance(prompt.text, str):
        raise PromptError(f"{record.where}: the prompt must be text, not {prompt.text!r}.")
    check_unicode(f"the prompt of {record.where}", prompt.text)
    return prompt


def prompt_of(entry: dict[str, Any], default_id: str, default_task: str) -> Prompt:
    """Returns the prompt of one record: ours (``prompt``) or Spec-Bench's (``turns``)."""
    if "prompt" in entry:
        return Prompt(
            str(entry.get("id", default_id)), str(entry.get("task", default_task)), entry["prompt"]
        )
    if not isinstance(entry["turns"], list):
        raise TypeError(f"a list of turns was expected, not {entry['turns']!r}")
    return Prompt(
        str(entry["question_id"]), str(entry.get("category", default_task)), entry["turns"][0]
    )


def chosen(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """Returns the first ``count`` prompts (unset: all), taking one of each task in turn."""
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    mixed = [p for turn in zip_longest(*by_task.values()) for p in turn if p is not None]
    return mixed[:count]


def batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Returns batches of exactly ``size`` prompts, each of one task where possible.

    The last prompts are left out where they do not fill a batch: a prompt that was answered already
    would fill it, but a drafter that remembers texts would find the very answer. The others are
    sorted by task.

    >>> [[p.id for p in b] for b in batches([Prompt(i, "t", "x") for i in "abc"], 2)]
    [['a', 'b']]
    """
    if size > len(prompts):
        raise PromptError(
            f"a batch of {size} needs at least that many prompts, not {len(prompts)}."
        )
    kept = prompts[: len(prompts) // size * size]
    tasks = list(dict.fromkeys(prompt.task for prompt in kept))
    sorted_by_task = sorted(kept, key=lambda prompt: tasks.index(prompt.task))
    return [sorted_by_task[i : i + size] for i in range(0, len(kept), size)]


def task_of(batch: Iterable[Prompt]) -> str:
    """Returns the task that all prompts of a batch share, or "mixed"."""
    tasks = {prompt.task for prompt in batch}
    return tasks.pop() if len(tasks) == 1 else "mixed"


# -- three kinds, a few prompts of each: what a short measurement goes by ----------------------

EACH = 4
"""Prompts of a kind: with fewer, an interval over them says next to nothing."""

KINDS = ("code", "chat", "editing")
"""Code to write, questions to answer, and given text to repeat with changes."""


def prompts_of_kinds(chat: bool) -> Mapping[str, list[Prompt]]:
    """Returns the prompts of each of the `KINDS`, as many of each.

    chat: questions for a model with a chat template; else texts to continue.
    """
    if chat:
        asked = [Prompt(*entry) for entry in (*CHATS, *FURTHER_CHATS)]
        found = {"code": _of_task(asked, "code"), "chat": _of_task(asked, "text")}
        return {**found, "editing": _short_changes()}
    texts = [Prompt(*entry) for entry in (*BUILT_IN, *FURTHER)]
    named = zip(KINDS, ("code", "chat", "copy"), strict=True)
    return {kind: _of_task(texts, task) for kind, task in named}


def _of_task(prompts: list[Prompt], task: str) -> list[Prompt]:
    return [prompt for prompt in prompts if prompt.task == task][:EACH]


def _short_changes() -> list[Prompt]:
    """The shortest change of each sort in the set "editing": long prompts take long to read."""
    shortest: dict[str, Prompt] = {}
    for prompt in sorted(read_prompts("editing"), key=lambda each: len(each.text)):
        shortest.setdefault(prompt.task, prompt)
    return list(shortest.values())[:EACH]
