"""A lossy rule's divergence is measured, and nothing is reported without it."""

from __future__ import annotations

import pytest
import torch

from outpace import LLM
from outpace.bench.benchmark import Benchmark
from outpace.bench.contest import BatchJob, BenchmarkPlan, OutpaceContestant
from outpace.bench.divergence import one_step, watching
from outpace.bench.prompts import Prompt
from outpace.bench.results import Report
from outpace.bench.synthetic import Pair
from outpace.core.proposal import Deterministic, Proposal, Sampled
from outpace.core.trees.tree import Tree
from outpace.errors import ConfigError
from outpace.verify.registry import make_rule

JOB = BatchJob(((1, 2, 3), (4, 5)), max_tokens=12, temperature=1.0, seed=3)


def probs(count: int, vocabulary: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.rand(count, vocabulary, generator=generator, dtype=torch.float64)
        .pow(4)
        .log()
        .softmax(-1)
    )


def sampled(q: torch.Tensor) -> Proposal:
    k = q.shape[0]
    tokens = q.argmax(-1)[None]
    return Proposal(tokens, Tree.chain(1, k), torch.tensor([k]), Sampled(q[None]))


@pytest.mark.parametrize("name", ["token", "match"])
def test_a_lossless_rule_has_none(name: str) -> None:
    p, q = probs(3, 9, seed=1), probs(2, 9, seed=2)
    variation, unseen = one_step(make_rule(name), p, sampled(q), 0)
    assert variation < 1e-12
    assert unseen < 1e-12


def test_a_lossy_rule_has_what_its_formula_says() -> None:
    p, q = probs(2, 9, seed=1), probs(1, 9, seed=2)
    accept = (p[0] / (0.5 * q[0])).clamp(max=1)
    residual = (p[0] - q[0]).clamp(min=0)
    distribution = q[0] * accept + (q[0] * (1 - accept)).sum() * residual / residual.sum()
    variation, _ = one_step(make_rule("lenient", lenience=0.5), p, sampled(q), 0)
    assert variation == pytest.approx(0.5 * float((distribution - p[0]).abs().sum()), abs=1e-9)
    assert variation > 0.01


def test_a_point_that_is_always_taken_is_as_far_as_the_distribution_is_from_it() -> None:
    p = probs(2, 5, seed=3)
    point = Proposal(torch.tensor([[2]]), Tree.chain(1, 1), torch.tensor([1]), Deterministic())
    variation, _ = one_step(make_rule("token"), p, point, 0)
    assert variation < 1e-12


def engine(pair: Pair, **verify: object) -> LLM:
    config = {"model": pair.drafter, "num_speculative_tokens": 3, "verify": verify}
    return LLM(pair.target, speculative_config=config, generation_config="none", max_num_seqs=2)


def test_watching_measures_along_a_run_and_changes_no_text(pair: Pair) -> None:
    ours = OutpaceContestant(engine(pair, name="lenient", lenience=0.3), "lenient")
    before = ours.run(JOB).texts
    with watching(ours.llm, limit=5) as watch:
        assert ours.run(JOB).texts == before
    found = watch.divergence()
    assert found is not None
    assert found.states == 5
    assert 0 < found.mean <= found.largest < 1
    assert found.unseen < 0.2
    assert ours.llm.engine.verifier.rule.name == "lenient"


def test_watching_a_lossless_rule_finds_nothing(pair: Pair) -> None:
    ours = OutpaceContestant(engine(pair, name="token"), "token")
    with watching(ours.llm, limit=8) as watch:
        ours.run(JOB)
    found = watch.divergence()
    assert found is not None
    # The mass beyond the 256 tokens written down is all that can be seen.
    assert found.mean <= found.unseen + 1e-4


def benchmarked(pair: Pair, llm: LLM, temperature: float) -> Report:
    prompts = [Prompt("a", "t", "one"), Prompt("b", "t", "two")]
    takers = [OutpaceContestant(llm, "plain", "off"), OutpaceContestant(llm, "lossy")]
    plan = BenchmarkPlan(temperatures=(temperature,), max_tokens=8)
    measured = Benchmark(plan, prompts, lambda t: list(t.encode()), takers).run()
    return Report({}, "plain", None, tuple(setting.result for setting in measured))


def test_a_lossy_rule_is_reported_with_its_divergence(pair: Pair) -> None:
    report = benchmarked(pair, engine(pair, name="lenient", lenience=0.3), temperature=1.0)
    lossy = report.cells[0].methods[1]
    assert not lossy.lossless
    assert lossy.divergence is not None
    assert lossy.divergence.mean > 0
    report.check()


def test_a_lossy_rule_without_a_divergence_cannot_be_written(pair: Pair) -> None:
    from dataclasses import replace

    report = benchmarked(pair, engine(pair, name="lenient", lenience=0.3), temperature=1.0)
    cell = report.cells[0]
    stripped = tuple(replace(m, divergence=None) for m in cell.methods)
    hidden = replace(report, cells=(replace(cell, methods=stripped),))
    with pytest.raises(ConfigError, match="'lenient' is lossy"):
        hidden.to_json()


def test_a_rule_that_cannot_be_measured_is_refused_before_anything_is_timed(pair: Pair) -> None:
    clock_reads: list[float] = []

    def clock() -> float:
        clock_reads.append(0.0)
        return 0.0

    # Nothing is drafted, so nothing shows how far the rule is off.
    llm = engine(pair, name="lenient", lenience=0.3)
    idle = OutpaceContestant(llm, "idle", 3)
    idle.speculative = "off"
    plan = BenchmarkPlan(temperatures=(1.0,), max_tokens=4)
    benchmark = Benchmark(
        plan, [Prompt("a", "t", "one")], lambda t: list(t.encode()),
        [OutpaceContestant(llm, "plain", "off"), idle], clock=clock,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="'lenient' is lossy"):
        benchmark.run()
    assert not clock_reads
