"""Plain against speculative decoding: the same target, prompts and token counts, in turns."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from time import perf_counter
from typing import Any

from rich.table import Table

from outpace.bench.session import OF_LOADING
from outpace.bench.statistics import UNSURE
from outpace.cli.printing import drafting, merged
from outpace.core.params import SamplingParams
from outpace.core.stats import Metrics
from outpace.inputs.prompts import Prompt
from outpace.llm import LLM
from outpace.outputs import RequestOutput

BUSY = 2
"""How many times as fast as another one a run of plain decoding is on a machine that does other
things, too."""

REPEATS = 5
FEWEST = 3
PATIENCE = 30.0
"""Seconds after which only the fewest repeats are made, and after twice that not even these."""
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Run:
    """One pass over all prompts."""

    seconds: float
    metrics: Metrics
    token_ids: list[list[int]]

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput], seconds: float) -> Run:
        """Returns the run that gave these outputs."""
        texts = [completion for output in outputs for completion in output.outputs]
        metrics = merged([completion.metrics for completion in texts], seconds)
        return cls(seconds, metrics, [completion.token_ids for completion in texts])

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.metrics.tokens_per_second


@dataclass(frozen=True)
class Comparison:
    """Runs of both kinds, made in turns; run i of both had the same seed."""

    plain: Sequence[Run]
    speculative: Sequence[Run]
    what: str
    expects_identity: bool
    lossless: bool
    dtype: str

    @property
    def speed_up(self) -> float | None:
        """Ratio of the rates of the `middle` runs; None where nothing was drafted, and where it
        is within the noise: some pair of neighbouring runs says that plain decoding was
        faster, and another one that it was slower; or the machine was so busy that plain runs
        differ by more than `BUSY` times."""
        if not self.total.num_draft_tokens:
            return None
        low, high = self.spread
        if len(self.plain) < FEWEST:  # too few to see how far they differ
            low, high = low / UNSURE, high * UNSURE
        rates = [run.rate for run in self.plain]
        if low <= 1 <= high or max(rates) > BUSY * min(rates):
            return None
        return middle(self.speculative).rate / middle(self.plain).rate

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest ratio of a pair of neighbouring runs."""
        pairs = zip(self.plain, self.speculative, strict=True)
        ratios = [fast.rate / slow.rate for slow, fast in pairs]
        return min(ratios), max(ratios)

    @property
    def lines(self) -> list[str]:
        """What is to be said below the table."""
        return [line for line in (drafting(self.total), self.note) if line]

    @property
    def identical(self) -> bool:
        """Whether every pair of runs wrote the same tokens."""
        pairs = zip(self.plain, self.speculative, strict=True)
        return all(slow.token_ids == fast.token_ids for slow, fast in pairs)

    @property
    def total(self) -> Metrics:
        """The counters of all speculative runs together."""
        runs = self.speculative
        return merged([run.metrics for run in runs], sum(run.seconds for run in runs))

    @property
    def note(self) -> str:
        """What is to be said about the texts."""
        if self.identical:
            return "Both wrote the same text, token for token."
        if not self.expects_identity:
            distribution = (
                "the same distribution"
                if self.lossless
                else "another distribution, as the rule is lossy"
            )
            return (
                f"The sampled texts differ by design (other draws from {distribution}); "
                "--verify coupled writes the same text with and without speculation."
            )
        if not self.lossless:
            return f"The texts differ from token {self._split} on: the rule is lossy."
        return (
            f"The texts differ from token {self._split} on: in {self.dtype}, scoring several "
            "tokens at once rounds otherwise than one by one, and turns near-ties; with "
            "--batch-invariant, or --dtype float64, they must agree."
        )

    @property
    def _split(self) -> int:
        """The first token, from 1, that differs in any text."""
        pairs = zip(self.plain, self.speculative, strict=True)
        texts = [zip(a.token_ids, b.token_ids, strict=True) for a, b in pairs]
        return min(
            (_first_difference(*text) for text in itertools.chain.from_iterable(texts)), default=0
        )

    def table(self) -> Table:
        """Returns the result for a terminal."""
        table = Table()
        table.add_column()
        table.add_column("plain", justify="right")
        table.add_column("speculative", justify="right")
        both = (self.plain, self.speculative)
        rates = [[run.rate for run in runs] for runs in both]
        shown = [middle(runs).metrics for runs in both]
        table.add_row("tokens/s, median run", *(f"{one.tokens_per_second:.1f}" for one in shown))
        table.add_row("  lowest - highest", *(f"{min(r):.1f} - {max(r):.1f}" for r in rates))
        for row in self._speed_up_rows():
            table.add_row(*row)
        rate = shown[1].acceptance_rate
        nothing = "none in this run" if self.total.num_draft_tokens else "nothing drafted"
        table.add_row("acceptance rate", "", nothing if rate is None else f"{rate:.0%}")
        table.add_row("mean acceptance length", *(f"{m.mean_acceptance_length:.2f}" for m in shown))
        table.add_row("target passes", *(f"{one.num_target_passes}" for one in shown))
        table.add_row("tokens", *(f"{one.num_emitted_tokens}" for one in shown))
        return table

    def _speed_up_rows(self) -> list[tuple[str, str, str]]:
        """The rows about the speed-up; none where nothing was drafted."""
        if not self.total.num_draft_tokens:
            return []
        (low, high), ratio = self.spread, self.speed_up
        shown = "within the noise" if ratio is None else f"[bold]{ratio:.2f}x[/bold]"
        among = f"{low:.2f}x - {high:.2f}x"
        return [("speed-up", "", shown), ("  in neighbouring runs", "", among)]

    def as_dict(self) -> dict[str, Any]:
        """Returns the result for ``--json``."""
        total = self.total
        return {
            "plain": _arm(self.plain),
            "speculative": _arm(self.speculative),
            "speed_up": self.speed_up,
            "speed_up_range": list(self.spread),
            "repeats": len(self.plain),
            "identical": self.identical,
            "account": None if total.account is None else total.account.as_dict(),
            "note": self.note,
        }


def _seed(params: SamplingParams, repeat: int) -> int:
    """The seed of a repeat; after the highest one the lowest comes."""
    return ((params.seed or 0) + repeat + (1 << 63)) % (1 << 64) - (1 << 63)


def _first_difference(a: Sequence[int], b: Sequence[int]) -> Any:
    if a == b:
        return float("inf")
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return 1 + sum(1 for _ in shared)


def middle(runs: Sequence[Run]) -> Run:
    """Returns the run with the median rate, of an even number the slower one of the two. All
    numbers of a side are those of this one run, so that they fit each other."""
    median_rate = median_low(run.rate for run in runs)
    return next(run for run in runs if run.rate == median_rate)


def _arm(runs: Sequence[Run]) -> dict[str, Any]:
    shown = middle(runs).metrics
    return {
        "tokens_per_second": shown.tokens_per_second,
        "seconds": [run.seconds for run in runs],
        "num_tokens": shown.num_emitted_tokens,
        "num_target_passes": shown.num_target_passes,
        "num_draft_tokens": shown.num_draft_tokens,
        "num_accepted_tokens": shown.num_accepted_tokens,
        "mean_acceptance_length": shown.mean_acceptance_length,
        "acceptance_rate": shown.acceptance_rate,
    }


def plain_llm(llm: LLM, options: Mapping[str, Any]) -> LLM:
    """Returns plain decoding over the same loaded target: an engine without a drafter, which would
    observe each round and might have the target's states read, and so be a slow baseline.

    options: the other arguments that the first engine was made with.
    """
    used = {name: value for name, value in options.items() if name not in OF_LOADING}
    # The coupled rule writes the same text with and without drafts: so its noise is needed here.
    rule = {"verify": llm.config.verify} if llm.engine.verifier.coupled else {}
    used |= {"speculative_config": {"method": "none", **rule}}
    return LLM(llm.target, max_num_seqs=llm.engine.target.max_rows, **used)


def measure(
    llm: LLM,
    without: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    say: Callable[[str], None],
) -> Comparison:
    """Returns the comparison: a warm-up of both kinds, then plain, speculative, plain, ...

    Every run writes as many tokens as the options allow, past any end of text, so that the counts
    agree; a text of a given form ends with it. without: plain decoding (`plain_llm`). say: is given
    a line about the progress.
    """
    resolved = llm.resolve(params)
    free = params.structured_outputs is None
    params = dataclasses.replace(
        params, ignore_eos=free, stop=None, stop_token_ids=(), min_tokens=None, logprobs=None
    )
    short = dataclasses.replace(params, max_tokens=min(WARM_UP_TOKENS, resolved.max_tokens or 1))
    for each in (without, llm):
        each.generate(prompts, short)
    plain: list[Run] = []
    speculative: list[Run] = []
    begin = perf_counter()
    for repeat in range(REPEATS):
        spent = perf_counter() - begin
        if (repeat >= FEWEST and spent > PATIENCE) or (repeat and spent > 2 * PATIENCE):
            break
        say(f"measuring, {repeat + 1} of {REPEATS} ...")
        # Another text each time, where texts are drawn: one may be easier to guess than the next.
        seeded = dataclasses.replace(params, seed=_seed(params, repeat))
        plain.append(_run(without, prompts, seeded))
        speculative.append(_run(llm, prompts, seeded))
    rule = llm.engine.verifier.rule
    return Comparison(
        plain,
        speculative,
        what=_what(llm, resolved, len(prompts), len(plain)),
        expects_identity=resolved.greedy or llm.engine.verifier.coupled,
        lossless=rule.lossless,
        dtype=str(llm.target.dtype).removeprefix("torch."),
    )


def _run(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> Run:
    llm.forget_texts()  # or a look-up would find the text that the run before has written
    begin = perf_counter()
    outputs = llm.generate(prompts, params)
    return Run.of(outputs, perf_counter() - begin)


def _what(llm: LLM, params: SamplingParams, prompts: int, repeats: int) -> str:
    distribution = "greedy" if params.greedy else f"temperature {params.temperature:g}"
    many = f", {prompts} prompts" if prompts > 1 else ""
    return (
        f"{llm.config.method}, k={llm.config.num_speculative_tokens}, {distribution}{many}, "
        f"{repeats} runs of each in turns"
    )
