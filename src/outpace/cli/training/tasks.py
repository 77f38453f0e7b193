"""Several drafters from one command, one for each task or language, and a router among them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from outpace.cli.training.flags import DrafterFlags, TextFlags
from outpace.errors import ConfigError

if TYPE_CHECKING:
    from outpace.targets.hf.loading.loaded import Loaded

ROUTER, ROUTES = "router.npz", "routes.json"
EXAMPLES = 1000
"""Prompts of a task that the router learns from, at most."""


def files_of(method: str, text: TextFlags) -> dict[str, list[Path]]:
    """Returns the files of each task, {} without ``--for``; ``ConfigError`` for what names none."""
    if not text.tasks:
        return {}
    from outpace.heads.registry import classifier_names

    if method in classifier_names():
        raise ConfigError(f"--for is for drafters, and {method} is none: give its text as --data.")
    found: dict[str, list[Path]] = {}
    for entry in text.tasks:
        task, equals, file = entry.partition("=")
        if not (equals and file and re.fullmatch(r"[\w.+-]*\w[\w.+-]*", task)):
            raise ConfigError(
                f"--for must be TASK=FILE, not {entry!r}: a task has letters, digits, and - + . _, "
                "since its drafter's folder has its name."
            )
        if task in (ROUTER, ROUTES):
            raise ConfigError(
                f"--for {task}=...: a file beside the drafters has that name: choose another."
            )
        found.setdefault(task, []).append(Path(file))
    if len(found) == 1:
        raise ConfigError("--for needs two tasks or more: for a single one use --data.")
    return found


def one_task(
    task: str, files: Mapping[str, Sequence[Path]], text: TextFlags, drafter: DrafterFlags
) -> tuple[TextFlags, DrafterFlags]:
    """Returns the flags of a task's own run. All of them share the disk that was allowed for."""
    lessons = None if text.lessons is None else text.lessons / task
    cache = text.cache / len(files)
    own = replace(text, tasks=None, data=list(files[task]), lessons=lessons, cache=cache)
    return own, replace(drafter, out=drafter.out / task)


def train_router(
    console: Console,
    target: Loaded,
    files: Mapping[str, Sequence[Path]],
    text: TextFlags,
    seed: int,
    out: Path,
) -> None:
    """Trains the router on the prompts as they will be asked, with the chat template around them,
    and writes it; ``ConfigError`` where there are too few."""
    from outpace.draft.route.classifier import TaskClassifier
    from outpace.heads.saving import saving
    from outpace.train.answers import prompts

    tokenizer = target.tokenizer
    examples = {}
    for task, paths in files.items():
        found = prompts(paths, tokenizer, target.name, text.prompt_tokens)
        step = -(-len(found) // EXAMPLES)
        examples[task] = [tokenizer.decode(ids, skip_special_tokens=True) for ids in found[::step]]
    made = TaskClassifier.trained(examples, seed)
    out.mkdir(parents=True, exist_ok=True)
    with saving(out / ROUTER):
        made.save(out / ROUTER)
    console.print(
        f"router: {made.accuracy:.0%} of {sum(map(len, examples.values())):,} prompts told right "
        "when they were left out"
    )


def write_routes(method: str, tasks: Iterable[str], out: Path) -> Path:
    """Writes the ``speculative_config`` that drafts for each prompt with its task's drafter, and
    for prompts of no known task with a look-up."""
    from outpace.heads.saving import saving

    folder = out.resolve()
    config = {
        "method": "task",
        "router": str(folder / ROUTER),
        "routes": {task: {"method": method, "model": str(folder / task)} for task in tasks},
        "default": {"method": "suffix"},
    }
    with saving(out / ROUTES):
        (out / ROUTES).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return out / ROUTES
