"""What the model of a machine predicts, compared with what was measured, and for machines that nobody has
measured (`outpace.bench.machines`):

    python lab/predicted.py            # predicted and measured speed-ups, by machine, method and task
    python lab/predicted.py --others   # the table of docs/doctor.md

Measured are JSON files of docs/results, and the pages of an EPYC with AVX2 and of an H100: of the
first there is no such file, and that of the second is no report of `bench run`. Of a run the model is given passes over one and eight tokens, or plain decoding where none were timed; what
was drafted and accepted; and what share plain decoding spent on reading prompts, by task.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import median

from outpace.bench.machines import (
    OTHERS,
    Machine,
    PassWork,
    computing_seconds,
    cpu,
    fitted,
    pass_seconds,
    predicted_times,
)
from outpace.bench.results import MethodResult, Report
from outpace.bench.statistics import AcceptanceCounts, geometric_mean
from outpace.bench.theory import PlayedDraft, Times, best_payoff, payoff, speedup_from_times

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TARGET = PassWork(0.99e9, 1.54e9, 28)
"""Qwen2.5-Coder 1.5B in Q4_K_M: bytes with 180 cached tokens, as the reports count them."""
HALF = PassWork(0.298e9, 0.494e9, 24)
"""The 0.5B, as the reports count it."""
EAGLE3 = PassWork(0.028e9, 0.045e9, 1)
MEDUSA = PassWork(0.012e9, 0.019e9, 1)
DRAFTS = {"draft_model": HALF, "eagle3": EAGLE3, "medusa": MEDUSA, "suffix": None}

REPORTS = {
    "Xeon, AMX": ("amx.json", cpu("AVX-512 VNNI", 2.6, 2, 24e9)),
    "Xeon, AMX, another hour": ("amx-peers.json", cpu("AVX-512 VNNI", 2.6, 2, 24e9)),
    "Xeon held to AVX2": ("amx-held-to-avx2.json", cpu("AVX2", 2.6, 2, 24e9)),
    "Xeon, VNNI": ("vnni.json", cpu("AVX-512 VNNI", 2.5, 2, 20e9)),
    "Zen 5": ("real-pair-zen5-with-head.json", cpu("AVX-512 VNNI", 3.8, 2, 50e9)),
    "Zen 5, faster memory": (
        "real-pair-zen5-llamacpp-with-head.json",
        cpu("AVX-512 VNNI", 3.8, 2, 60e9),
    ),
}
"""By machine, its report, and what it is like. Bandwidth and multiply-adds follow from the passes
that the report timed, over 1 and 8 tokens; if it timed none, bandwidth from plain decoding."""


@dataclass(frozen=True)
class Row:
    """One speed-up over plain decoding."""

    machine: str
    method: str
    task: str
    """Or "all"."""
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The part by which the prediction is too high."""
        return self.predicted / self.measured - 1


def rounds_of(counts: AcceptanceCounts) -> list[PlayedDraft]:
    """Returns rounds with these counts by depth; which of them accepted most is made up, which no
    sum over them shows."""
    rounds = []
    for number in range(counts.passes):
        drafted = sum(number < each for each in counts.drafted_per_position)
        accepted = sum(number < each for each in counts.accepted_per_position)
        rounds.append(PlayedDraft(drafted, accepted))
    return rounds


def width_of(counts: AcceptanceCounts) -> float:
    """Returns the nodes of a level, on average."""
    return counts.drafted / sum(counts.drafted_per_position)


# -- machines that were measured -------------------------------------------------------------------


def of_report(name: str) -> Iterator[Row]:
    """Yields the rows of a report, by method and task."""
    file, like = REPORTS[name]
    (cell,) = Report.from_json((RESULTS / file).read_text()).cells
    plains, methods = cell.methods[:2], cell.methods[2:]
    a_token = 2 / sum(each.decode_tokens_per_second or 0.0 for each in plains)
    machine = measured_machine(methods, like, a_token)
    for method in methods:
        drafter = drafter_of(method)
        if drafter is None or method.speedup is None:
            continue
        rows, weights = [], []
        for number, task in enumerate(method.tasks):
            assert task.acceptance
            assert task.speedup
            rate = sum(each.tasks[number].tokens_per_second for each in plains) / 2
            prompts = max(0.0, 1 / rate / a_token - 1)
            decoding = speedup(task.acceptance, machine, *drafter)
            found = with_prompts(decoding, prompts, drafter[0])
            rows.append(Row(name, method.name, task.task, found, task.speedup.mean))
            weights.append(task.speedup.count)
        logs = sum(n * log(row.predicted) for n, row in zip(weights, rows, strict=True))
        yield Row(name, method.name, "all", exp(logs / sum(weights)), method.speedup.mean)
        if method.name.split()[0] in DRAFTS:  # a report says of all tasks together who drafted
            yield from rows


def measured_machine(methods: Sequence[MethodResult], like: Machine, a_token: float) -> Machine:
    """Returns the machine of a report. a_token: seconds of plain decoding."""
    if seconds := timed_passes(methods):
        return fitted(TARGET, {n: seconds[n] for n in (1, 8)}, like)
    left = (a_token - like.overhead - TARGET.layers * like.layer_overhead) ** 2
    left -= computing_seconds(TARGET, like, 1) ** 2
    return replace(like, bandwidth=TARGET.nbytes / sqrt(left))


def timed_passes(methods: Sequence[MethodResult]) -> dict[int, float]:
    """Returns the seconds of passes by their columns, of all methods with which they were timed."""
    found: dict[int, list[float]] = {}
    for method in methods:
        for columns, seconds in method.prediction.verify_seconds if method.prediction else ():
            found.setdefault(columns, []).append(seconds)
    return {columns: median(several) for columns, several in sorted(found.items())}


def pass_errors() -> dict[tuple[str, int], float]:
    """Returns, by machine and columns, the part by which a predicted pass takes too long."""
    found = {}
    for name, (file, like) in REPORTS.items():
        (cell,) = Report.from_json((RESULTS / file).read_text()).cells
        if seconds := timed_passes(cell.methods):
            machine = measured_machine(cell.methods, like, 0.0)
            for columns, took in seconds.items():
                found[name, columns] = pass_seconds(TARGET, machine, columns) / took - 1
    return found


def drafter_of(method: MethodResult) -> tuple[PassWork | None, float] | None:
    """Returns the work for a drafted token, and the share of the drafted tokens that it is for, the
    others being found by look-ups; None for what is not ours, or does not say who drafted."""
    name = method.name.split()[0]
    if name in DRAFTS:
        return DRAFTS[name], 1.0
    if name != "auto" or method.account is None:
        return None
    drafted = {each.name: each.drafted for each in method.account.drafters}
    (model,) = [each for each in drafted if DRAFTS[each] is not None] or ["suffix"]
    return DRAFTS[model], drafted[model] / sum(drafted.values())


def speedup(
    counts: AcceptanceCounts, machine: Machine, draft: PassWork | None, share: float
) -> float:
    """Returns how much faster decoding is with the drafts of a run than without."""
    rounds = rounds_of(counts)
    longest = len(counts.drafted_per_position)
    times = predicted_times(TARGET, draft, machine, longest, width_of(counts))
    drafting = {
        k: machine.overhead + share * (s - machine.overhead) for k, s in times.draft.items()
    }
    return payoff(rounds, Times(drafting, times.verify), times.verify[1], longest).speedup


def with_prompts(decoding: float, prompts: float, draft: PassWork | None) -> float:
    """Returns the speed-up with reading prompts. prompts: what that takes for each token of the
    text, in passes. A draft model reads them, too."""
    own = draft.multiply_adds / TARGET.multiply_adds if draft else 0.0
    return (1 + prompts) / (prompts * (1 + own) + 1 / decoding)


# -- machines without a report ---------------------------------------------------------------------

ZEN3_PAGE = {
    "draft_model": {
        "code": 1.26, "maths": 1.35, "chat": 1.02, "translation": 1.01, "summarisation": 1.19,
        "questions": 0.89, "editing": 1.20, "questions on a text": 0.90,
    },
    "suffix": {
        "code": 1.29, "maths": 1.33, "chat": 1.00, "translation": 1.06, "summarisation": 1.58,
        "questions": 1.00, "editing": 1.70, "questions on a text": 1.15,
    },
}  # fmt: skip
"""docs/results/real-pair-avx2.md, by task: the prompts and answers are those of the Zen 5's."""
ZEN3_PASSES = {1: 0.055, 8: 0.098}
"""Seconds of passes there (lab/decisions.md, 10)."""


def of_zen3() -> Iterator[Row]:
    """Yields what the drafts of the Zen 5 bring on the Zen 3, cut where that is best."""
    (cell,) = Report.from_json((RESULTS / REPORTS["Zen 5"][0]).read_text()).cells
    plains = cell.methods[:2]
    there = 2 / sum(each.decode_tokens_per_second or 0.0 for each in plains)
    machine = fitted(TARGET, ZEN3_PASSES, cpu("AVX2", 3.4, 2, 20e9))
    of_zen5 = measured_machine(cell.methods, REPORTS["Zen 5"][1], there)
    slower = computing_seconds(TARGET, machine, 64) / computing_seconds(TARGET, of_zen5, 64)
    for method in cell.methods:
        name = method.name.split()[0]
        for number, task in enumerate(method.tasks if name in ZEN3_PAGE else ()):
            assert task.acceptance is not None
            decoding = best(task.acceptance, TARGET, DRAFTS[name], machine)
            rate = sum(each.tasks[number].tokens_per_second for each in plains) / 2
            prompts = max(0.0, 1 / rate - there) * slower / ZEN3_PASSES[1]
            found = with_prompts(decoding, prompts, DRAFTS[name])
            yield Row("Zen 3, AVX2", name, task.task, found, ZEN3_PAGE[name][task.task])


def best(
    counts: AcceptanceCounts, target: PassWork, draft: PassWork | None, machine: Machine
) -> float:
    """Returns the speed-up of these drafts, cut at the best length; at least 1, since `auto` leaves
    out what does not pay."""
    longest, width = len(counts.drafted_per_position), width_of(counts)
    times = predicted_times(target, draft, machine, longest, width)
    found = best_payoff(rounds_of(counts), times, times.verify[1], range(1, longest + 1))
    return max(1.0, found.speedup)


LLAMA = PassWork(15.0e9, 7.5e9, 32)
TWO_LAYERS = PassWork(1.9e9, 0.96e9, 2)
H100_PAGE = {"draft_model 5": (0.81, 2.21), "draft_model 5, batch_invariant": (0.81, 2.11)}
"""docs/results/gpu-h100.md, one greedy text at a time: agreement and speed-up. Acceptance is
nearly independent from token to token in such a pair."""


def of_h100() -> Iterator[Row]:
    """Yields what drafts of five tokens bring on the H100."""
    times = predicted_times(LLAMA, TWO_LAYERS, OTHERS["H100, bfloat16"], 5)
    for way, (alpha, measured) in H100_PAGE.items():
        yield Row("H100", way, "all", speedup_from_times(alpha, 5, times), measured)


def compared() -> list[Row]:
    """Returns all that was measured, with what is predicted."""
    found = [row for name in REPORTS for row in of_report(name)]
    return [*found, *of_zen3(), *of_h100()]


# -- machines that nobody has measured -------------------------------------------------------------

MODELS = {
    "1.5B": (TARGET, {"0.5B": HALF}),
    "7B": (PassWork(4.4e9, 7.07e9, 28), {"0.5B": HALF, "1.5B": TARGET}),
    "32B": (PassWork(19.1e9, 31.98e9, 64), {"0.5B": HALF, "1.5B": TARGET}),
}
"""Qwen2.5 in Q4_K_M, without the embedding."""


def table() -> Iterator[str]:
    """Yields the lines of the table of what others would get."""
    (cell,) = Report.from_json((RESULTS / "amx.json").read_text()).cells
    counts = {each.name.split()[0]: each for each in cell.methods}
    names = list(MODELS)
    yield f"| machine | {' | '.join(f'{name}, {way}' for name in names for way in _ways(name))} |"
    yield "|---" * (1 + sum(len(_ways(name)) for name in names)) + "|"
    for label, machine in OTHERS.items():
        cells = []
        for name in names:
            target, drafts = MODELS[name]
            head = replace(
                EAGLE3,
                nbytes=EAGLE3.nbytes * target.nbytes / TARGET.nbytes,
                multiply_adds=EAGLE3.multiply_adds * target.multiply_adds / TARGET.multiply_adds,
            )
            for way, draft in {**drafts, "EAGLE-3": head}.items():
                method = counts["eagle3" if way == "EAGLE-3" else "draft_model"]
                by_task = [
                    best(task.acceptance, target, draft, machine)
                    for task in method.tasks
                    if task.acceptance
                ]
                cells.append(f"{geometric_mean(by_task):.2f}")
        yield f"| {label} | {' | '.join(cells)} |"


def _ways(name: str) -> list[str]:
    return [*MODELS[name][1], "EAGLE-3"]


# -- what is printed -------------------------------------------------------------------------------


def main() -> None:
    """Prints what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--others", action="store_true", help="machines that nobody has measured")
    if parser.parse_args().others:
        print(*table(), sep="\n")
        return
    rows = compared()
    print("| machine | method | task | predicted | measured | error |\n|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.machine} | {row.method} | {row.task} | {row.predicted:.2f} | "
            f"{row.measured:.2f} | {row.error:+.0%} |"
        )
    for machine in dict.fromkeys(row.machine for row in rows):
        errors = sorted(abs(row.error) for row in rows if row.machine == machine)
        within = sum(each <= 0.1 for each in errors)
        print(
            f"{machine}: {within} of {len(errors)} within 10 %, median "
            f"{median(errors):.0%}, largest {errors[-1]:.0%}"
        )
    for most in (8, 17):
        largest = max(abs(each) for (_, n), each in pass_errors().items() if n <= most)
        print(f"passes over up to {most} tokens: largest error {largest:.0%}")


if __name__ == "__main__":
    main()
