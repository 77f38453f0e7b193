"""Counters put together, predictions from times, the memory bound."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from outpace import LLM
from outpace.bench.benchmark import Benchmark
from outpace.bench.contest import BatchJob, BenchmarkPlan, OutpaceContestant
from outpace.bench.meter import Meter
from outpace.bench.prompts import Prompt
from outpace.bench.roofline import (
    bound_seconds,
    drafter_traffic,
    has_one_cost,
    peak_of,
    read_bandwidth,
    reads_a_part,
    target_traffic,
)
from outpace.bench.statistics import acceptance, predicted_seconds, rounds_of, split, total_rounds
from outpace.bench.synthetic import Pair
from outpace.bench.theory import Times, acceptance_of
from outpace.core.stats import Metrics
from outpace.draft.base import Round
from outpace.engine.request import EngineRequest
from outpace.inputs.prompts import ChatIds


def metrics(*rounds: tuple[int, int]) -> Metrics:
    """Rounds of (drafted, accepted) of one text."""
    found = Metrics()
    for drafted, accepted in rounds:
        found.count_round(drafted, accepted, accepted + 1)
        found.count_positions(drafted, accepted)
    found.draft_seconds, found.verify_seconds, found.sample_seconds = 1.0, 2.0, 0.5
    found.total_seconds = 3.5 + len(rounds)
    return found


def test_acceptance_is_summed_with_both_definitions_by_position() -> None:
    found = acceptance([metrics((3, 3), (3, 1)), metrics((2, 0))])
    assert (found.drafted, found.accepted, found.passes, found.emitted) == (8, 4, 3, 7)
    assert found.rate == 0.5
    assert found.length == pytest.approx(7 / 3)
    assert found.per_position == pytest.approx([2 / 3, 1 / 3, 1 / 2])
    assert found.conditional == pytest.approx([2 / 3, 1 / 2, 1.0])
    assert acceptance([]).rate == 0.0


def test_what_short_drafts_never_reached_was_not_judged() -> None:
    found = acceptance([metrics(*[(1, 1)] * 50, *[(2, 2)] * 25, *[(2, 0)] * 25)])
    assert found.conditional == [0.75, 1.0]
    alpha = acceptance_of(found.accepted_per_position, found.judged_per_position)
    assert alpha == pytest.approx(100 / 125)


def test_rounds_are_those_of_the_text_that_saw_most() -> None:
    longest = metrics((3, 1), (3, 0), (1, 1), (0, 0))
    assert rounds_of([longest, metrics((3, 3))]) == {3: 2, 1: 1, 0: 1}
    assert rounds_of([]) == {}
    assert total_rounds([[metrics((2, 1))], [metrics((2, 0))]]) == {2: 2}


def test_a_tree_counts_with_its_nodes() -> None:
    tree = Metrics()
    for _ in range(2):
        tree.count_round(7, 2, 3)
        tree.count_positions(3, 2)
    assert rounds_of([tree]) == {7: 2}


def test_predicted_seconds() -> None:
    times = Times({2: 0.2}, {1: 1.0, 3: 1.2})
    assert predicted_seconds({2: 10, 0: 1}, times) == pytest.approx(10 * 1.4 + 1.0)


def test_the_split_adds_up_to_the_wall() -> None:
    found = split([(5.0, [metrics((1, 1))]), (4.0, [metrics((1, 1))])])
    assert found is not None
    assert (found.draft, found.verify, found.sample) == (2.0, 4.0, 1.0)
    assert found.other == pytest.approx(2.0)
    assert found.total == pytest.approx(9.0)
    assert split([(5.0, [])]) is None


def engine(pair: Pair) -> LLM:
    config = {"model": pair.drafter, "num_speculative_tokens": 3}
    return LLM(pair.target, speculative_config=config, max_num_seqs=2)


def test_the_bound_counts_weights_once_and_caches_per_row(pair: Pair) -> None:
    llm = engine(pair)
    target, drafter = target_traffic(llm), drafter_traffic(llm)
    assert drafter is not None
    # The tied head is read whole; 2 kv_heads of 16 numbers in 4 and 1 layers, keys and values.
    assert target.weights == 4 * pair.target_parameters
    assert drafter.weights == 4 * pair.drafter_parameters
    assert (target.per_cached_token, drafter.per_cached_token) == (1024, 256)
    seconds = bound_seconds({2: 3}, 2, 100, 1e6, target, drafter)
    moved = 3 * (target.weights + 200 * 1024) + 6 * (drafter.weights + 200 * 256)
    assert seconds == pytest.approx(moved / 1e6)
    assert drafter_traffic(LLM(pair.target, speculative_config={"method": "ngram"})) is None


@pytest.mark.parametrize(
    ("config", "one"),
    [
        ({"method": "draft_model"}, True),
        ({"method": "auto"}, False),
        ({"method": "ensemble", "drafters": [{}, {}]}, True),
        ({"method": "ensemble", "drafters": [{}, {"method": "ngram"}]}, False),
    ],
)
def test_drafters_of_several_prices_have_no_prediction_and_no_bound(
    pair: Pair, config: dict[str, Any], one: bool
) -> None:
    named = {"model": pair.drafter}
    inner = [each or named for each in config.get("drafters", [])]
    given = {**config, "drafters": inner} if inner else {**named, **config}
    llm = LLM(pair.target, speculative_config={**given, "num_speculative_tokens": 2})
    assert has_one_cost(llm) == one
    plan = BenchmarkPlan(temperatures=(0.0,), max_tokens=32, sweep=(2,))
    takers = [OutpaceContestant(llm, "plain", "off"), OutpaceContestant(llm, "drafted")]
    texts = [Prompt("a", "t", "one"), Prompt("b", "t", "two")]
    made = Benchmark(plan, texts, lambda text: list(text.encode()), takers, bandwidth=1e9)
    found = made.run()[0].result
    plain, drafted = found.methods
    assert plain.roof is not None
    assert (drafted.prediction is not None, drafted.roof is not None) == (one, one)
    assert found.sweep is not None
    assert all((point.predicted is not None) == one for point in found.sweep.points)
    assert found.sweep.points


def test_samples_of_a_prompt_are_made_together_and_stand_in_its_place(pair: Pair) -> None:
    config = {"method": "consensus", "min_token_span": 1, "num_speculative_tokens": 3}
    ours = OutpaceContestant(
        LLM(pair.target, speculative_config=config, max_num_seqs=4), "consensus"
    )
    job = BatchJob(((1, 2), (1, 2), (3, 4), (3, 4)), 30, 0.3, samples=2)
    seen: list[Sequence[EngineRequest]] = []
    with ours.llm.engine.observing(lambda trace: seen.append(list(trace.requests))):
        made = ours.run(job)
    assert [len(text) for text in made.texts] == [30] * 4
    rows = next(requests for requests in seen if len(requests) == 4)
    one, again, other, last = (request.group for request in rows)
    assert one is again
    assert other is last
    assert one is not other
    assert [request.output_ids for request in rows] == made.texts, "in their order"
    assert not any(request.reproducible for request in rows), "they may draft for each other"
    plain = OutpaceContestant(ours.llm, "plain", "off")
    assert plain.run(job).texts == plain.run(job).texts
    assert len({tuple(text) for text in plain.run(job).texts}) > 2


def test_the_task_of_a_prompt_is_its_tag_where_tags_choose_the_drafter(pair: Pair) -> None:
    config = {
        "method": "tagged",
        "routes": {"code": {"model": pair.drafter}},
        "default": {"method": "ngram", "prompt_lookup_min": 1},
        "num_speculative_tokens": 2,
    }
    ours = OutpaceContestant(LLM(pair.target, speculative_config=config, max_num_seqs=1), "tagged")
    prompts = ((5, 6, 5, 6, 5), (5, 6, 5, 6, 5))
    job = BatchJob(prompts, 12, 0.0, tasks=("code", "chat"))
    drafted: dict[str | None, set[str]] = {}

    def note(trace: Round) -> None:
        for request, outcome in zip(trace.requests, trace.outcomes, strict=True):
            if outcome.drafted:
                drafted.setdefault(request.params.tag, set()).add(outcome.method)

    with ours.llm.engine.observing(note):
        ours.run(job)
    assert drafted == {"code": {"draft_model"}, "chat": {"ngram"}}
    plain = OutpaceContestant(ours.llm, "plain", "off")
    assert {params.tag for params in plain._params(job)} == {"code", "chat"}
    other = OutpaceContestant(LLM(pair.target, speculative_config={"method": "ngram"}), "ngram")
    assert {params.tag for params in other._params(job)} == {None}


def test_a_chat_ends_where_its_template_says(pair: Pair) -> None:
    """Also where the model's own configuration does not know that token."""
    plain = OutpaceContestant(LLM(pair.target, speculative_config={"method": "none"}), "plain")
    (text,) = plain.run(BatchJob(((3, 1, 4),), 6, 0.0)).texts
    last = text.index(text[2])
    plan = BenchmarkPlan(batches=(1,), max_tokens=6, to_end=True)
    chats = [Prompt("one", "t", "one")]
    asked = Benchmark(plan, chats, lambda _: ChatIds([3, 1, 4], ends=(text[2],)), [plain], True)
    (job,) = asked._work(1, 0.0).jobs
    assert plain.run(job).texts == [text[: last + 1]]
    assert job.max_tokens == max(2, last + 1)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_coupled_rule_is_compared_with_plain_texts_of_its_own_noise(
    pair: Pair, samples: int
) -> None:
    """Plain decoding draws its tokens in another way than this rule does."""
    plain = LLM(pair.target, speculative_config={"method": "none"}, max_num_seqs=2)
    config = {"model": pair.drafter, "num_speculative_tokens": 3, "verify": "coupled"}
    coupled = LLM(pair.target, speculative_config=config, max_num_seqs=2)
    takers = [OutpaceContestant(plain, "plain", "off"), OutpaceContestant(coupled, "coupled")]
    texts = [Prompt(name, "t", name) for name in ("one", "two", "three", "four")]
    plan = BenchmarkPlan(batches=(2,), temperatures=(0.8,), max_tokens=12, samples=samples)
    measured = Benchmark(plan, texts, lambda text: list(text.encode()), takers).run()[0]
    found = measured.result.methods[1].identity
    assert found is not None
    assert found.identical == found.compared == 4 * samples
    baseline, own = (
        [run.made.texts for run in measured.runs.of(name)] for name in ("plain", "coupled")
    )
    assert baseline != own


@pytest.mark.parametrize(
    ("family", "counts"),
    [
        ("MixtralConfig", {"num_local_experts": 4}),
        ("DbrxConfig", {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 2}}),
        ("DeepseekV3Config", {"n_routed_experts": 4}),
        ("GraniteMoeHybridConfig", {"num_local_experts": 0}),
        ("LlamaConfig", {}),
        ("LlavaConfig", {}),
    ],
)
def test_a_model_of_which_a_part_is_read_has_no_bound(family: str, counts: dict[str, Any]) -> None:
    config = getattr(transformers, family)(**counts)
    dense, model = (
        SimpleNamespace(config=one, model=SimpleNamespace(config=one))
        for one in (transformers.LlamaConfig(), config)
    )
    mixed = family not in ("LlamaConfig", "GraniteMoeHybridConfig")
    for target, drafter in ((model, None), (model, dense), (dense, model)):
        engine = SimpleNamespace(drafter=SimpleNamespace(loaded=drafter))
        llm: Any = SimpleNamespace(target=target, engine=engine)
        assert reads_a_part(llm) == mixed


def test_the_meter_times_both_parts_and_leaves_nothing_behind(pair: Pair) -> None:
    llm = engine(pair)
    ours = OutpaceContestant(llm, "ours")
    job = BatchJob(((1, 2, 3), (4, 5, 6)), 8, 0.0)
    before = ours.run(job).texts
    for temperature in (0.0, 0.8):
        meter = Meter(llm, batch=2, context=20, temperature=temperature)
        meter.sample([0, 2, 3], [1, 4], repeats=2)
        times = meter.times
        assert set(times.draft) == {2, 3}
        assert set(times.verify) == {1, 4}
        assert min(*times.draft.values(), *times.verify.values()) > 0
        assert times.deepest() == 3
    assert llm.engine.target.num_rows == 0
    assert ours.run(job).texts == before


def test_memory_is_measured() -> None:
    with peak_of() as peak:
        torch.ones(1000)
    assert peak.bytes > 10**7
    assert read_bandwidth(torch.device("cpu"), megabytes=8, repeats=1) > 1e6
