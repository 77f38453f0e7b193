"""Every sampling option under every drafter and every rule: honoured, with proof, or refused.

An option that reaches the distribution is honoured if the distribution that enters the rule at
every node of every draft is the one that plain decoding has after the same tokens. That is checked
in float64 to 1e-12 on runs with real drafts, rejections and ragged batches (`Spy`). What the rule
makes of p is enumerated elsewhere (`distributions`), so that together the option is proved for the pair.
Where no distribution enters a rule, because greedy and coupled rows are walked, the whole text must
be the one of a loop of plain forwards.

An option that ends or reports a text is honoured if the text is the one without it, cut where the
option says, or reports what the plain distribution says. Each option is given a value that changes
the text, and it is checked that it does.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lab.options.kinds import (
    DEAD_END,
    DRAFTING,
    ENDS,
    GOES_ON,
    LENGTH,
    LOGPROBS,
    PROBS,
    SEED,
    SEVERAL,
    TEXT,
)
from lab.options.reference import Case, Reference
from lab.options.trial import Trial
from outpace.audit.letters import END_ID, LETTERS, LetterTokenizer, letter_model
from outpace.core.logits.truncation import NEG_INF
from outpace.core.params import SamplingParams
from outpace.core.progress import silent
from outpace.draft.registry import drafter_names, find_drafter
from outpace.errors import IncompatibleRule, OutpaceError
from outpace.heads.classifiers import JudgeHead
from outpace.llm import LLM
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.verify.registry import find_rule, rules

TOKENS = 7
FREQUENT = {"logit_bias": {END_ID: 5.0}}
"""Makes texts end early, for the options that say whether they may."""
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "draft_tree, with replacement": ("draft_tree", {"with_replacement": True}),
    "draft_tree, dynamic": ("draft_tree", {"branching": "dynamic", "top_k": 3, "depth": 3}),
}
"""Lines of the table that are a drafter with other options than its `dummy_options`."""
AGAIN = {"logit_bias": {5: 4.0}}
"""Makes one letter come again and again, for the options that forbid it."""


def other_than_last(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor that looks back: never the same token twice in a row."""
    return scores.scatter(1, ids[:, -1:], NEG_INF)


def nothing_after(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor that forbids every token after some letters, as a grammar does in a state
    that no text should reach. Prompts end with such letters, too."""
    dead = torch.isin(ids[:, -1:], torch.tensor([3, 4, 5, 7]))
    return scores.masked_fill(dead, NEG_INF)


def rarely_nothing_after(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The same for one of these letters, so that most texts go on beside drafts that end there."""
    return scores.masked_fill(ids[:, -1:] == 4, NEG_INF)


def cases() -> list[Case]:
    """Returns at least one case for each field of `SamplingParams`."""
    four_letters = (0, 2, 4, 6)
    every_pair = [[i, j] for i in four_letters for j in four_letters]
    every_third = [[i, j] for i in range(len(LETTERS)) for j in (1, 4, 7)]
    return [
        Case("temperature", {"temperature": 0.5}, PROBS),
        Case("temperature", {"temperature": 0.0}, PROBS),
        Case("top_k", {"top_k": 2}, PROBS),
        Case("top_p", {"top_p": 0.5}, PROBS),
        Case("min_p", {"min_p": 0.5}, PROBS),
        Case("typical_p", {"typical_p": 0.4}, PROBS),
        Case("repetition_penalty", {"repetition_penalty": 1.8}, PROBS),
        Case("presence_penalty", {"presence_penalty": 2.0}, PROBS, AGAIN),
        Case("frequency_penalty", {"frequency_penalty": 2.0}, PROBS, AGAIN),
        Case("logit_bias", {"logit_bias": {3: 4.0, 1: NEG_INF}}, PROBS),
        Case("allowed_token_ids", {"allowed_token_ids": (0, 2, 4, 6, 8)}, PROBS),
        Case("bad_words", {"bad_words": list(LETTERS[::2])}, PROBS),
        Case("bad_words_ids", {"bad_words_ids": every_third}, PROBS),
        Case("logits_processors", {"logits_processors": (other_than_last,)}, PROBS),
        Case("min_tokens", {"min_tokens": 6}, PROBS, FREQUENT),
        Case("stop", {"stop": list(LETTERS[:9])}, ENDS),
        Case("stop_token_ids", {"stop_token_ids": tuple(range(9))}, ENDS),
        Case("ignore_eos", {"ignore_eos": True}, GOES_ON, FREQUENT),
        Case("max_tokens", {"max_tokens": 3}, LENGTH),
        Case("include_stop_str_in_output", {"include_stop_str_in_output": True}, TEXT,
             {"stop": list(LETTERS[:9])}),
        Case("skip_special_tokens", {"skip_special_tokens": False}, TEXT,
             {**FREQUENT, "ignore_eos": True}),
        # Warped, or the logarithm of any distribution would do.
        Case("logprobs", {"logprobs": 3}, LOGPROBS, {"temperature": 0.6, "top_k": 5, **AGAIN}),
        Case("seed", {"seed": 12345}, SEED),
        Case("n", {"n": 3}, SEVERAL),
        Case("speculative", {"speculative": "off"}, DRAFTING),
        Case("speculative", {"speculative": 1}, DRAFTING),
        Case("logits_processors", {"logits_processors": (nothing_after,)}, DEAD_END),
        Case("logits_processors", {"logits_processors": (rarely_nothing_after,)}, DEAD_END),
        # After the first letter, the second option forbids what the first allows.
        Case("bad_words_ids", {"bad_words_ids": every_pair, "allowed_token_ids": four_letters},
             DEAD_END),
        Case("tag", {"tag": "copying"}, DRAFTING),
        Case("prediction", {"prediction": (3, 1, 4)}, DRAFTING),
        Case("structured_outputs", {"structured_outputs": {"regex": "([ace][bdf]){4,}"}}, PROBS),
    ]  # fmt: skip


def uncovered() -> set[str]:
    """Returns the fields of `SamplingParams` that no case proves: none, or the gate is
    incomplete."""
    fields = {one.name for one in dataclasses.fields(SamplingParams)}
    return fields - {case.option for case in cases()}


@dataclass(frozen=True)
class Cell:
    """One option under one drafter and one rule."""

    option: str
    drafter: str
    rule: str
    state: str
    """"honoured", "refused" or "BROKEN"."""
    reason: str
    """The kind of proof, the error's text, or what went wrong."""


@dataclass(frozen=True)
class OptionsReport:
    """The table. ``ok`` is the verdict."""

    cells: list[Cell]
    nodes: int
    """Distributions that were compared with those of plain decoding."""
    worst: float
    """Greatest difference of two probabilities among them."""
    drafted: int = 0
    accepted: int = 0
    missing: list[str] = field(default_factory=list)
    """Options without a case, or with one that changes nothing."""

    @property
    def ok(self) -> bool:
        """Whether every cell is honoured or refused, and every option has one."""
        return not self.missing and not any(cell.state == "BROKEN" for cell in self.cells)

    def __add__(self, other: OptionsReport) -> OptionsReport:
        """Returns the table of both."""
        return OptionsReport(
            self.cells + other.cells,
            nodes=self.nodes + other.nodes,
            worst=max(self.worst, other.worst),
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            missing=sorted({*self.missing, *other.missing}),
        )


def audit_options(
    methods: Sequence[str] | None = None,
    rule_names: Sequence[str] | None = None,
    family: str = "llama",
    workers: int = 1,
    report: Callable[[str, int], None] = silent,
) -> OptionsReport:
    """Returns the table for these drafters and rules (default: all that are registered).

    workers: processes at once, each of which takes one drafter after another; report: is called with
    each drafter that is done, and with the number of all. Raises ``ConfigError`` for a name that
    nobody has: what does not exist is not refused.
    """
    chosen = list(methods or [*drafter_names(), *VARIANTS])
    named = list(rule_names or rules())
    for method in chosen:
        if method not in VARIANTS:
            find_drafter(method)
    for rule in named:
        find_rule(rule)
    found = OptionsReport([], 0, 0.0)
    for method, of_one in zip(chosen, _reports(chosen, named, family, workers), strict=True):
        found += of_one
        report(method, len(chosen))
    return found


def _reports(
    methods: Sequence[str], rule_names: Sequence[str], family: str, workers: int
) -> Iterator[OptionsReport]:
    """Yields the table of each drafter, in their order."""
    jobs = (methods, repeat(rule_names), repeat(family))
    if workers == 1:
        yield from map(_of_drafter, *jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(_of_drafter, *jobs)


def _of_drafter(method: str, rule_names: Sequence[str], family: str) -> OptionsReport:
    """Returns the table of one drafter."""
    reference = Reference(letter_model(family), LetterTokenizer(), cases(), TOKENS)
    trials: list[Trial] = []
    cells = [cell for rule in rule_names for cell in _judged(reference, method, rule, trials)]
    return OptionsReport(
        cells,
        nodes=sum(trial.nodes for trial in trials),
        worst=max((trial.worst for trial in trials), default=0.0),
        drafted=sum(trial.drafted for trial in trials),
        accepted=sum(trial.accepted for trial in trials),
        missing=sorted({*uncovered(), *reference.without_effect()}),
    )


def _judged(reference: Reference, method: str, rule: str, trials: list[Trial]) -> Iterator[Cell]:
    """Yields the cells of one drafter and one rule.

    A pair counts as refused only where the rule says that it does not take what the drafter
    proposes; that something could not be built for another reason is a fault.
    """
    named = sorted({case.option for case in reference.cases})
    try:
        llm = build(reference.plain.target, method, rule)
    except IncompatibleRule as refusal:
        yield from (Cell(name, method, rule, "refused", str(refusal)) for name in named)
        return
    except OutpaceError as error:
        yield from (Cell(name, method, rule, "BROKEN", f"not built: {error}") for name in named)
        return
    trial = Trial(reference, llm)
    trials.append(trial)
    failures, proofs = trial.run()
    refused = trial.refused()
    for name in named:
        if name in refused:
            yield Cell(name, method, rule, "refused", refused[name])
        elif name in failures:
            yield Cell(name, method, rule, "BROKEN", failures[name])
        else:
            yield Cell(name, method, rule, "honoured", proofs[name])


def build(loaded: LoadedModel, method: str, rule: str) -> LLM:
    """Returns an engine with this drafter and rule on the letters, whose model is loaded once."""
    name, more = VARIANTS.get(method, (method, {}))
    config = {"method": name, **find_drafter(name).dummy_options(loaded), **more}
    config["num_speculative_tokens"] = 6 if find_drafter(name).trees else 3
    options = _rule_options(loaded.config.hidden_size).get(rule)
    config["verify"] = rule if options is None else {"name": rule, **options}
    return LLM(loaded, speculative_config=config, max_num_seqs=40, generation_config="none")


def _rule_options(width: int) -> Mapping[str, dict[str, Any]]:
    """Options of the rules that cannot be named without. width: of the target's hidden states."""
    weight = torch.linspace(-1, 1, width, dtype=torch.float64)
    return {"judge": {"head": JudgeHead(weight)}, "reflective": {"prompt": "abc"}}


# -- what is printed ---------------------------------------------------------------------------


def findings(report: OptionsReport) -> Group:
    """Returns what `audit options` prints: the proof of each option, the counts for each drafter
    and rule, why the others are refused, and at the end what is broken."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for cell in report.cells:
        counts[cell.drafter, cell.rule][cell.state] += 1
    taken = {(cell.drafter, cell.rule) for cell in report.cells if cell.state != "refused"}
    refused = {(cell.drafter, cell.rule): cell.reason for cell in report.cells
               if (cell.drafter, cell.rule) not in taken}  # fmt: skip
    alone = {cell.option: cell.reason for cell in report.cells
             if cell.state == "refused" and (cell.drafter, cell.rule) in taken}  # fmt: skip
    table = Table(title="options: honoured (how it is proved), refused or BROKEN")
    for column in ("drafter", "rule", "honoured", "refused", "BROKEN"):
        table.add_column(column)
    for pair, states in counts.items():
        table.add_row(*pair, *(str(states[state] or "") for state in _STATES))
    lines = [f"refused: {pair[0]} with {pair[1]}: {text}" for pair, text in refused.items()]
    lines += [f"refused by some drafters: {option}: {text}" for option, text in alone.items()]
    lines.append(
        f"{report.nodes} distributions at drafted nodes and roots, of {report.drafted} drafted and "
        f"{report.accepted} accepted tokens: worst difference {report.worst:.1g}"
    )
    lines += [
        f"BROKEN: {cell.option} with {cell.drafter} and {cell.rule}: {cell.reason}"
        for cell in report.cells
        if cell.state == "BROKEN"
    ]
    lines += [f"no proof for: {name}" for name in report.missing]
    return Group(_proofs(report), table, *map(Text, [*lines, "OK" if report.ok else "FAILED"]))


_STATES = ("honoured", "refused", "BROKEN")


def _proofs(report: OptionsReport) -> Table:
    table = Table(title="proofs")
    table.add_column("option")
    table.add_column("by")
    for option in sorted({cell.option for cell in report.cells}):
        reasons = {cell.reason: None for cell in report.cells
                   if cell.option == option and cell.state == "honoured"}  # fmt: skip
        table.add_row(option, "; ".join(reasons) or "-")
    return table
