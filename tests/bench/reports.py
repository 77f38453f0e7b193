"""Reports made by hand, for what is written and drawn from them; answers, read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outpace.bench.results import (
    MethodResult,
    Prediction,
    Report,
    Roof,
    SettingResult,
    Sweep,
    SweepPoint,
    TaskResult,
)
from outpace.bench.statistics import AcceptanceCounts, Identity, Interval, Split, TextDifference
from outpace.core.account import Account, DrafterAccount, Mode, Reason

PREDICTION = Prediction(2.2, 2.1, 0.8, ((3, 0.01),), ((1, 0.05), (4, 0.06)))

DRAFTED = DrafterAccount("draft_model", False, 33, 33, 33, 100, 70, Reason.GAIN, 0.2, 0.7)


def answered(file: Path) -> list[dict[str, Any]]:
    """Returns what a file in Spec-Bench's format says of each answer."""
    lines = [json.loads(line) for line in file.read_text().strip().split("\n")]
    return [choice for line in lines for choice in line["choices"]]


def method(name: str, ratio: float | None) -> MethodResult:
    interval = None if ratio is None else Interval(ratio, ratio - 0.1, ratio + 0.1, 12)
    drafting = (
        AcceptanceCounts(100, 70, 103, 33, (33, 33, 34), (30, 22, 18), (33, 30, 22))
        if ratio
        else None
    )
    return MethodResult(
        name=name,
        what=f"{name} <as it is>",
        rule="token" if ratio else None,
        lossless=True,
        tokens_per_second=20.0 * (ratio or 1),
        decode_tokens_per_second=21.0 * (ratio or 1),
        speedup=interval,
        decode_speedup=interval,
        speedup_by_job=() if ratio is None else (ratio + 0.07, ratio - 0.13),
        tasks=(TaskResult("story", interval, 20.0, drafting),),
        acceptance=drafting,
        split=Split(0.1, 0.7, 0.1, 0.1),
        identity=Identity(12, 11, (TextDifference("p1", 3, 5, 6, 1e-5),)) if ratio else None,
        peak_bytes=10**9,
        own_bytes=9 * 10**8,
        over_peers={"hf": Interval(1.5, None, None, 1)} if ratio else {},
        prediction=PREDICTION if ratio else None,
        roof=Roof(31.0, 0.9),
        account=Account(Mode.MEASURED, 33, (DRAFTED,)) if ratio else None,
    )


def report() -> Report:
    point = SweepPoint(3, Interval(1.9, 1.8, 2.0, 4), 2.0, 2.1)
    cell = SettingResult(
        batch=1,
        temperature=0.0,
        prompts=12,
        prompt_tokens=40.5,
        max_tokens=128,
        methods=(method("plain", None), method("draft_model", 2.0)),
        refused={"hf": "it is asleep"},
        sweep=Sweep("draft_model", 0.8, (point, replace(point, k=5))),
    )
    return Report({"cpu": "a <cpu>", "command": "outpace bench run"}, "plain", 12e9, (cell,))


def wide_report(names: Sequence[str], tasks: Sequence[str]) -> Report:
    """Returns a report on these methods besides plain decoding, and on these tasks; at the second
    batch size the first method does not take part."""
    made = [method("plain", None), *(method(name, 1.5) for name in names)]
    every = [
        replace(m, tasks=tuple(replace(m.tasks[0], task=task) for task in tasks)) for m in made
    ]
    base = report()
    one = replace(
        base.cells[0], methods=tuple(every), sweep=replace(base.cells[0].sweep, method=names[0])
    )
    four = replace(one, batch=4, methods=(every[0], *every[2:]), sweep=None)
    return replace(base, cells=(one, four))
