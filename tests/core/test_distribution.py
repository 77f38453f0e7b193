"""Distributions against transformers' own processors, alone, in batches, and along drafted
branches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from outpace.core.logits_pipeline import Branches, History, LogitsPipeline, RowFault, RowOptions
from outpace.core.params import LogitsProcessor, SamplingParams
from outpace.errors import ParamsError

NEG_INF = -math.inf
EXACT = 1e-15


# -- one row, and what transformers makes of it --------------------------------------------------


@dataclass
class Row:
    """One request as the tests see it."""

    logits: list[float]
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    bad_words: list[list[int]] = field(default_factory=list)
    end_ids: list[int] = field(default_factory=list)

    @property
    def vocabulary(self) -> int:
        return len(self.logits)

    @property
    def resolved(self) -> RowOptions:
        params = SamplingParams(**{"temperature": 1.0, **self.options}).resolve({})
        return RowOptions(params, tuple(map(tuple, self.bad_words)), tuple(self.end_ids))


def probs_of(rows: list[Row], dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns ``[B, V]``: the distributions at the roots of a batch."""
    pipeline = LogitsPipeline([row.resolved for row in rows], rows[0].vocabulary)
    logits = torch.tensor([row.logits for row in rows], dtype=dtype)[:, None]
    history = History([row.prompt for row in rows], [row.output for row in rows])
    return pipeline(logits, Branches.root(len(rows)), history)[:, 0]


def distribution_of(row: Row, dtype: torch.dtype = torch.float64) -> Tensor:
    return probs_of([row], dtype)[0]


class _Stub(GenerationMixin):
    """As much of a model as it takes to ask transformers which processors it would use."""

    config = SimpleNamespace(is_encoder_decoder=False)  # type: ignore[assignment]


def only(tokens: Sequence[int]) -> LogitsProcessor:
    """Returns what `PrefixConstrainedLogitsProcessor` does, but for its way out of a dead end."""

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        allowed = torch.zeros_like(scores, dtype=torch.bool)
        allowed[:, list(tokens)] = True
        return scores.masked_fill(~allowed, NEG_INF)

    return processor


def transformers_probs(row: Row) -> Tensor:
    """Returns ``[V]``: the distribution that ``model.generate`` would draw from."""
    p = row.resolved.params
    config = GenerationConfig(
        do_sample=True,
        temperature=p.temperature,
        top_k=max(p.top_k or 0, 0),
        top_p=p.top_p,
        min_p=p.min_p or None,
        typical_p=p.typical_p,
        repetition_penalty=p.repetition_penalty,
        bad_words_ids=row.bad_words or None,
        min_new_tokens=p.min_tokens,
        num_beams=1,
        sequence_bias={(k,): float(v) for k, v in (p.logit_bias or {}).items()} or None,
    )
    config._eos_token_tensor = torch.tensor(row.end_ids) if row.end_ids else None
    first = [] if p.allowed_token_ids is None else [only(p.allowed_token_ids)]
    processors = _Stub()._get_logits_processor(
        config,
        input_ids_seq_length=len(row.prompt),
        logits_processor=[*first, *p.logits_processors],
        device="cpu",
        model_kwargs={},
    )
    ids = torch.tensor([row.prompt + row.output])
    return processors(ids, torch.tensor([row.logits], dtype=torch.float64)).softmax(-1)[0]


def assert_distribution(actual: Tensor, expected: Tensor, within: float = EXACT) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=within)


# -- strategies ----------------------------------------------------------------------------------

TIED = st.sampled_from([NEG_INF, -2.0, -0.5, 0.0, 0.5, 0.5, 1.75])
FREE = st.floats(-8, 8, width=32)
SINGLE: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([1e-6, 0.05, 0.7, 1.3, 50.0]),
    "top_k": st.integers(1, 12),
    "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.75, 0.9, 1 - 1e-12]),
    "min_p": st.sampled_from([1e-9, 0.05, 0.3, 0.9, 1.0]),
    "typical_p": st.sampled_from([1e-9, 0.2, 0.5, 0.9, 0.999]),
    "repetition_penalty": st.sampled_from([0.5, 1.2, 3.0]),
    "min_tokens": st.integers(1, 5),
}


def by_token(vocabulary: int, options: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.integers(0, vocabulary - 1), options, max_size=3)


@st.composite
def rows(draw: st.DrawFn, vocabulary: int = 0, only: tuple[str, ...] = ()) -> Row:
    """Rows with short histories that repeat themselves, and any of the options (or ``only``)."""
    size = vocabulary or draw(st.integers(1, 9))
    token = st.integers(0, size - 1)
    logits = draw(st.lists(draw(st.sampled_from([TIED, FREE])), min_size=size, max_size=size))
    assume(max(logits) > NEG_INF)
    names = only or tuple(sorted(draw(st.sets(st.sampled_from([*SINGLE, *MANY])))))
    options = {name: draw(SINGLE[name]) for name in names if name in SINGLE}
    end_ids = draw(st.lists(token, max_size=2, unique=True))
    if "logit_bias" in names:
        options["logit_bias"] = draw(by_token(size, st.sampled_from([NEG_INF, -4.0, 0.25, 3.0])))
    if "allowed_token_ids" in names:
        options["allowed_token_ids"] = draw(st.lists(token, min_size=1))
    bad_words = []
    if "bad_words" in names:
        bad_words = draw(st.lists(st.lists(token, min_size=1, max_size=4), max_size=4))
        # transformers drops words that are an end token; here they are forbidden as asked.
        bad_words = [word for word in bad_words if len(word) > 1 or word[0] not in end_ids]
    prompt, output = (
        draw(st.lists(token, min_size=1, max_size=4)),
        draw(st.lists(token, max_size=4)),
    )
    return Row(logits, prompt, output, options, bad_words, end_ids)


MANY = ("logit_bias", "allowed_token_ids", "bad_words")


# -- against transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SINGLE, *MANY])
def test_each_option_alone_is_transformers_own(name: str) -> None:
    @given(rows(only=(name,)))
    def check(row: Row) -> None:
        expected = transformers_probs(row)
        assume(bool(expected.isfinite().all()))
        assert_distribution(distribution_of(row), expected)

    check()


@given(rows())
def test_options_together_are_transformers_own_in_its_order(row: Row) -> None:
    expected = transformers_probs(row)
    assume(bool(expected.isfinite().all()))
    assert_distribution(distribution_of(row), expected)


@given(rows())
def test_distributions_are_distributions(row: Row) -> None:
    assume(bool(transformers_probs(row).isfinite().all()))
    for dtype, within in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        distribution = distribution_of(row, dtype)
        assert distribution.dtype == dtype
        assert bool((distribution >= 0).all()), distribution
        assert abs(float(distribution.double().sum()) - 1) <= within, distribution


def test_custom_processors_come_after_min_tokens_and_before_temperature() -> None:
    seen: list[tuple[list[int], list[float]]] = []

    def double(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append((ids[0].tolist(), scores[0].tolist()))
        return scores * 2

    row = Row([0.5, 1.0, 2.0], [1], [2], {"temperature": 0.5, "logits_processors": (double,)})
    row.options["min_tokens"], row.end_ids = 4, [1]
    assert_distribution(distribution_of(row), transformers_probs(row))
    assert seen[0] == ([1, 2], [0.5, NEG_INF, 2.0]), "ids are prompt and output, scores are raw"


def test_processors_run_one_after_another() -> None:
    def add(ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.arange(3.0)

    def triple(ids: Tensor, scores: Tensor) -> Tensor:
        return scores * 3

    row = Row([1.0, 0.0, -1.0], options={"logits_processors": (add, triple), "top_k": 2})
    assert_distribution(distribution_of(row), transformers_probs(row))


def test_a_processor_that_writes_in_place_does_not_reach_the_logits() -> None:
    def forbid_first(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 0] = NEG_INF
        return scores

    pipeline = LogitsPipeline(
        [Row([0.0] * 3, options={"logits_processors": (forbid_first,)}).resolved], 3
    )
    logits = torch.zeros(1, 1, 3, dtype=torch.float64)
    distribution = pipeline(logits, Branches.root(1), History([[0]], [[]]))
    assert distribution.tolist() == [[[0.0, 0.5, 0.5]]]
    assert logits.tolist() == [[[0.0, 0.0, 0.0]]]


# -- penalties by hand ---------------------------------------------------------------------------


def test_presence_and_frequency_penalties_count_the_output_and_not_the_prompt() -> None:
    options = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    row = Row([1.0, 1.0, 1.0, 1.0], [3, 3, 0], [1, 1, 2], options)
    # OpenAI: logit - count * frequency - (count > 0) * presence.
    expected = torch.tensor([1.0, 1 - 2 * 0.25 - 0.5, 1 - 0.25 - 0.5, 1.0], dtype=torch.float64)
    assert_distribution(distribution_of(row), expected.softmax(-1))


def test_repetition_penalty_comes_before_the_subtracted_ones() -> None:
    options = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": -0.5}
    row = Row([3.0, -3.0, 1.0], [1], [0], options)
    expected = torch.tensor([3.0 / 2 - 1.0 + 0.5, -3.0 * 2, 1.0], dtype=torch.float64)
    assert_distribution(distribution_of(row), expected.softmax(-1))


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_token_beyond_the_vocabulary_in_the_history_is_no_penalty(name: str) -> None:
    # The target's tokens under a drafter whose output layer is smaller.
    known, unknown = Row([1.0, 2.0], [0], [1]), Row([1.0, 2.0], [0, 7], [9, 1, 2])
    known.options = unknown.options = {name: 1.5}
    assert distribution_of(unknown).tolist() == distribution_of(known).tolist()


# -- words, ends, bounds -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "output", "banned"),
    [
        ([1, 2], [], True),
        ([0, 1], [2], True),
        ([0], [1, 2], True),
        ([2], [], False),
        ([2, 1], [], False),
        ([1, 2, 0], [], False),
    ],
)
def test_a_bad_word_is_cut_before_its_last_token_wherever_it_began(
    prompt: list[int], output: list[int], banned: bool
) -> None:
    distribution = distribution_of(Row([0.0] * 5, prompt, output, bad_words=[[1, 2, 3]]))
    assert (distribution[3] == 0) == banned
    assert int((distribution == 0).sum()) == int(banned)


def test_a_bad_word_longer_than_the_history_forbids_nothing() -> None:
    distribution = distribution_of(Row([0.0] * 3, [1], [], bad_words=[[1, 1, 1, 1, 2], [0, 1, 2]]))
    assert distribution.tolist() == distribution_of(Row([0.0] * 3, [1])).tolist()


def test_words_and_ends_beyond_the_vocabulary_have_nothing_to_forbid() -> None:
    row = Row([0.0, 0.0], [0], bad_words=[[5], [0, 9]], end_ids=[7, -1])
    row.options["min_tokens"] = 3
    assert distribution_of(row).tolist() == [0.5, 0.5]


def test_min_tokens_forbids_the_end_until_enough_tokens_are_out() -> None:
    row = Row([0.0, 9.0], [1], options={"min_tokens": 2}, end_ids=[1])
    probs = [distribution_of(Row(row.logits, [1], [0] * n, row.options, [], [1])) for n in range(4)]
    assert [float(distribution[1]) > 0 for distribution in probs] == [False, False, True, True]


def test_min_tokens_without_an_end_token_forbids_nothing() -> None:
    assert distribution_of(Row([0.0, 0.0], options={"min_tokens": 2})).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", {3: 1.0}), ("allowed_token_ids", [0, 3])]
)
def test_options_that_name_an_unknown_token_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ParamsError, match=rf"{name} names token 3; the vocabulary has 0 to 2"):
        distribution_of(Row([0.0] * 3, options={name: value}))


def test_a_bias_that_forbids_every_token_is_refused() -> None:
    options = {"logit_bias": {1: NEG_INF}, "allowed_token_ids": [1]}
    with pytest.raises(ParamsError, match="forbid every token"):
        distribution_of(Row([0.0] * 3, options=options))


def test_options_that_leave_no_token_are_refused() -> None:
    row = Row([0.0] * 3, options={"allowed_token_ids": [1], "min_tokens": 1}, end_ids=[1])
    with pytest.raises(ParamsError, match="allowed_token_ids, bad_words, min_tokens"):
        distribution_of(row)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafted_dead_end_still_has_a_distribution(temperature: float) -> None:
    # As a grammar does: no token may follow one that the grammar does not know.
    def after_zero_nothing(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, NEG_INF) if ids[0, -1] == 0 else scores

    options = {"logits_processors": (after_zero_nothing,), "temperature": temperature}
    pipeline = LogitsPipeline([Row([0.0] * 3, options=options).resolved], 3)
    branches = Branches(torch.tensor([[[0], [0]]]), torch.tensor([[[False], [True]]]))
    probs = pipeline(torch.zeros(1, 2, 3, dtype=torch.float64), branches, History([[1]], [[]]))
    torch.testing.assert_close(probs.sum(-1), torch.ones(1, 2, dtype=torch.float64))


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_k": 3, "top_p": 0.99}, {"typical_p": 0.9}])
def test_forbidden_tokens_stay_forbidden_when_few_are_left(options: dict[str, Any]) -> None:
    row = Row([NEG_INF, 1.0, NEG_INF, 0.0, NEG_INF, NEG_INF], options=options)
    distribution = distribution_of(row)
    assert distribution.isfinite().all()
    assert (distribution > 0).tolist() == [False, True, False, True, False, False]


def test_top_k_keeps_those_that_tie_with_the_last() -> None:
    distribution = distribution_of(Row([1.0, 0.0, 1.0, 1.0], options={"top_k": 2}))
    torch.testing.assert_close(
        distribution, torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64) / 3
    )


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
def test_one_keeps_all_in_float32_beside_a_row_that_cuts(name: str) -> None:
    logits = [30.0, 0.0, -30.0, 10.0]
    probs = probs_of([Row(logits, options={name: 1.0}), Row(logits, options={name: 0.5})])
    assert bool((probs[0] > 0).all()), probs[0]
    assert int((probs[1] > 0).sum()) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logits", [[300.0, -300.0, 290.0], [0.0, 0.0, -1e4]])
def test_the_lowest_temperature_is_nearly_greedy_and_finite(
    logits: list[float], dtype: torch.dtype
) -> None:
    distribution = distribution_of(Row(logits, options={"temperature": 1e-6}), dtype)
    top = torch.tensor([value == max(logits) for value in logits])
    torch.testing.assert_close(distribution, top.float() / top.sum())


# -- batches -------------------------------------------------------------------------------------


def _alone(row: Row) -> Tensor | None:
    try:
        distribution = distribution_of(row)
    except ParamsError:
        return None
    return distribution if bool(distribution.isfinite().all()) else None


@given(st.integers(1, 6).flatmap(lambda v: st.lists(rows(vocabulary=v), min_size=2, max_size=4)))
@example([Row([1.0, 2.0, 0.0], options={"temperature": 0}), Row([0.0] * 3, options={"top_k": 1})])
@example([Row([1.0, 0.0], options={"typical_p": 0.5}), Row([0.0, 1.0], options={"temperature": 0})])
def test_a_row_of_a_batch_has_the_distribution_it_has_alone(batch: list[Row]) -> None:
    alone = [_alone(row) for row in batch]
    kept = [
        (row, distribution)
        for row, distribution in zip(batch, alone, strict=True)
        if distribution is not None
    ]
    assume(len(kept) > 1)
    together = probs_of([row for row, _ in kept])
    for actual, (_, expected) in zip(together, kept, strict=True):
        assert_distribution(actual, expected)


def test_a_greedy_row_beside_sampled_ones_is_one_hot() -> None:
    options = [{"temperature": 0}, {"typical_p": 0.3}, {"temperature": 0, "typical_p": 0.3}]
    probs = probs_of([Row([0.0, 0.4, 0.3], options=each) for each in options])
    assert probs[0].tolist() == [0.0, 1.0, 0.0]
    assert probs[2].tolist() == [0.0, 1.0, 0.0]


# -- greedy, types, shapes -----------------------------------------------------------------------


@given(rows(only=("repetition_penalty", "bad_words", "logit_bias", "min_tokens")))
def test_greedy_is_the_most_probable_token_after_the_penalties(row: Row) -> None:
    sampled = transformers_probs(row)
    assume(bool(sampled.isfinite().all()))
    row.options["temperature"] = 0
    distribution = distribution_of(row)
    assert sorted(distribution.tolist()) == [0.0] * (row.vocabulary - 1) + [1.0]
    assert float(sampled[distribution.argmax()]) == float(sampled.max())


def test_greedy_ignores_truncation() -> None:
    distribution = distribution_of(
        Row([0.0, 2.0, 1.0], options={"temperature": 0, "typical_p": 0.01, "top_k": 3})
    )
    assert distribution.tolist() == [0.0, 1.0, 0.0]


def test_best_is_the_token_of_the_greedy_distribution() -> None:
    pipeline = LogitsPipeline([Row([0.0] * 4, options={"temperature": 0}).resolved] * 2, 4)
    logits = torch.randn(2, 1, 4)
    best = pipeline.argmax_tokens(logits, Branches.root(2), History([[0]] * 2, [[]] * 2))
    distribution = pipeline(logits, Branches.root(2), History([[0]] * 2, [[]] * 2))
    assert best.tolist() == distribution.argmax(-1).tolist()


def test_reported_is_the_log_of_the_distribution() -> None:
    row = Row([0.0, 1.0, 2.0], options={"top_k": 2, "temperature": 0.5})
    pipeline = LogitsPipeline([row.resolved], 3)
    logits = torch.tensor([[row.logits]], dtype=torch.float64)
    reported = pipeline.compute_logprobs(logits, Branches.root(1), History([[0]], [[]]))
    assert_distribution(reported[0, 0].exp(), distribution_of(row))
    assert reported[0, 0, 0] == NEG_INF


def test_reported_of_a_greedy_row_is_the_distribution_before_the_argmax() -> None:
    pipeline = LogitsPipeline([Row([], options={"temperature": 0}).resolved], 3)
    logits = torch.tensor([[[0.0, 1.0, 2.0]]], dtype=torch.float64)
    reported = pipeline.compute_logprobs(logits, Branches.root(1), History([[0]], [[]]))
    assert_distribution(reported, logits.log_softmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_half_precision_logits_give_float32_distributions(
    dtype: torch.dtype, temperature: float
) -> None:
    row = Row([0.1, 0.2, 0.3, -4.0], options={"temperature": temperature, "top_p": 0.9})
    distribution = distribution_of(row, dtype)
    rounded = Row(torch.tensor(row.logits, dtype=dtype).tolist(), options=row.options)
    assert distribution.dtype == torch.float32
    torch.testing.assert_close(distribution, distribution_of(rounded, torch.float32))


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"temperature": 0}, {"min_p": 0.1}])
def test_logits_beyond_the_vocabulary_are_cut(options: dict[str, Any]) -> None:
    row = Row([0.0, 1.0, 2.0], options=options)
    pipeline = LogitsPipeline([row.resolved], 3)
    padded = torch.tensor([[[*row.logits, 99.0, math.nan]]], dtype=torch.float64)
    distribution = pipeline(padded, Branches.root(1), History([[0]], [[]]))
    assert distribution[0, 0].tolist() == distribution_of(row).tolist()


@given(rows())
def test_the_logits_are_left_as_they_were(row: Row) -> None:
    maker_row = row.resolved
    assume(_alone(row) is not None)
    logits = torch.tensor([[row.logits]], dtype=torch.float64)
    kept = logits.clone()
    LogitsPipeline([maker_row], row.vocabulary)(
        logits, Branches.root(1), History([row.prompt], [row.output])
    )
    assert torch.equal(logits, kept)


# -- each drafted position sees its own history --------------------------------------------------


def favour_repeats(ids: Tensor, scores: Tensor) -> Tensor:
    """Adds to a token's score for each time that it is among the last three."""
    bonus = torch.zeros_like(scores)
    recent = ids[:, -3:]
    return scores + bonus.scatter_add(1, recent, torch.ones_like(recent, dtype=scores.dtype))


LOOKING_BACK: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.1},
    {"frequency_penalty": 0.6},
    {"min_tokens": 4},
    {"bad_words": True},
    {"logits_processors": (favour_repeats,)},
    {"repetition_penalty": 0.6, "frequency_penalty": 0.3, "min_tokens": 3, "bad_words": True},
    {"logits_processors": (favour_repeats,), "top_p": 0.8, "temperature": 0.6, "min_p": 0.1},
]


@pytest.mark.parametrize("options", LOOKING_BACK, ids=lambda o: "+".join(o))
def test_the_distribution_at_a_node_is_the_distribution_after_committing_its_branch(
    options: dict[str, Any],
) -> None:
    vocabulary, nodes, depth = 5, 6, 4
    generator = torch.Generator().manual_seed(sum(map(ord, "".join(options))))
    plain = {k: v for k, v in options.items() if k != "bad_words"}
    bad_words = [[3], [1, 2], [0, 1, 4], [2, 2]] if "bad_words" in options else []
    row = Row([], [2, 0, 1], [1, 4], plain, bad_words, [4])
    logits = torch.randn(nodes, vocabulary, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocabulary, (nodes, depth), generator=generator)
    valid = torch.rand(nodes, depth, generator=generator) < 0.6
    valid[0] = False
    # Where nothing is drafted the table may hold anything.
    junk = torch.tensor([-1, 10**9])[torch.randint(2, (nodes, depth), generator=generator)]
    branches = Branches(tokens.where(valid, junk)[None], valid[None])
    pipeline = LogitsPipeline([row.resolved], vocabulary)
    probs = pipeline(logits[None], branches, History([row.prompt], [row.output]))[0]
    for node in range(nodes):
        committed = row.output + tokens[node][valid[node]].tolist()
        root = Row(logits[node].tolist(), row.prompt, committed, plain, bad_words, row.end_ids)
        assert_distribution(probs[node], distribution_of(root))


@given(rows(vocabulary=4), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_distributions_along_a_chain_are_distributions_of_the_text_so_far(
    row: Row, drafted: list[int]
) -> None:
    roots = [
        Row(
            row.logits,
            row.prompt,
            row.output + drafted[:n],
            row.options,
            row.bad_words,
            row.end_ids,
        )
        for n in range(len(drafted) + 1)
    ]
    expected = [_alone(root) for root in roots]
    assume(all(distribution is not None for distribution in expected))
    length = len(drafted)
    tokens = torch.tensor(drafted).expand(1, length + 1, length)
    branches = Branches(tokens, torch.ones(1, length + 1, length).tril(-1).bool())
    logits = torch.tensor(row.logits, dtype=torch.float64).expand(1, length + 1, -1)
    pipeline = LogitsPipeline([row.resolved], row.vocabulary)
    probs = pipeline(logits, branches, History([row.prompt], [row.output]))[0]
    for actual, distribution in zip(probs, expected, strict=True):
        assert distribution is not None
        assert_distribution(actual, distribution)


def test_rows_with_and_without_looking_back_do_not_mix() -> None:
    looking = Row([1.0, 1.0, 1.0], [0], [1], {"frequency_penalty": 1.0})
    plain = Row([1.0, 1.0, 1.0], [2], [2, 2])
    pipeline = LogitsPipeline([plain.resolved, looking.resolved], 3)
    branches = Branches(torch.tensor([[[0], [2]]] * 2), torch.tensor([[[False], [True]]] * 2))
    history = History([[2], [0]], [[2, 2], [1]])
    probs = pipeline(torch.ones(2, 2, 3, dtype=torch.float64), branches, history)
    penalised = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).softmax(-1)
    assert probs[0].unique().numel() == 1
    torch.testing.assert_close(probs[1, 1], penalised)


@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_that_are_no_distribution_are_found_from_the_distribution(
    damage: float, place: int, dtype: torch.dtype
) -> None:
    """Without truncation nobody looks at the scores themselves."""
    pipeline = LogitsPipeline(
        [RowOptions(SamplingParams(temperature=0.8).resolve({}))], vocabulary=10
    )
    logits = torch.zeros(1, 1, 10, dtype=dtype)
    if damage == -math.inf:
        logits.fill_(damage)
    logits[0, 0, place] = damage
    with pytest.raises(RowFault, match="not finite numbers"):
        pipeline(logits, Branches.root(1), History([[1]], [[]]))
    logits[0, 0] = -math.inf
    logits[0, 0, place] = 1.0  # one token is enough for a distribution
    assert float(pipeline(logits, Branches.root(1), History([[1]], [[]]))[0, 0, place]) == 1.0


def test_scores_out_of_range_are_blamed_on_the_options_that_are_on() -> None:
    given = SamplingParams(temperature=1.0, logit_bias={1: 1e39}, presence_penalty=0.5)
    pipeline = LogitsPipeline([RowOptions(given.resolve({}))], vocabulary=3)
    with pytest.raises(RowFault, match=r"milder values of presence_penalty=0\.5, logit_bias\."):
        pipeline(torch.zeros(1, 1, 3), Branches.root(1), History([[1]], [[]]))
