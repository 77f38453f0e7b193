"""With a trained head, too, the next turn of a chat reads its new tokens only, in target and head,
and is drafted for as if all had been read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.draft.registry import drafters, find_drafter
from outpace.engine.request import EngineRequest
from outpace.heads.base import Head, TargetShape
from outpace.heads.registry import find_head
from outpace.methods.heads.base import TrainedDrafter
from outpace.targets.hf.loading.loaded import LoadedModel
from representatives import representatives
from targets.families import CONTEXT, drafter, plain, target
from targets.generating import greedy

FIRST = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)

HEADS = [name for name, kind in drafters().items() if issubclass(kind, TrainedDrafter)]
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "hydra-prefix": ("hydra", {"prefix": True}),
    "clover-prefix": ("clover", {"prefix": True}),
    "ctc-prefix": ("ctc", {"prefix": True}),
    "p-eagle": ("eagle3", {"parallel": True, "mask_token": 5}),
    "eagle3-window": ("eagle3", {"layers": 2, "windows": [6, 0]}),
}
KINDS = [*HEADS, *SIZES]
STATELESS = {"pass", "hidden_transfer", "diffusion"}
"""Heads that are given no states: the target has kept texts for them all along."""


@lru_cache
def speculation(kind: str) -> tuple[tuple[str, Any], ...]:
    if kind not in SIZES:
        options = find_drafter(kind).dummy_options(LoadedModel(target("llama"), None, "llama"))
        return tuple({"method": kind, **options}.items())
    method, sizes = SIZES[kind]
    return (("method", method), ("model", made(method, **sizes)))


def made(method: str, **sizes: Any) -> Head:
    """A head with random weights, so that every part of it matters."""
    found = find_head(method)
    torch.manual_seed(0)
    model: Any = target("llama")
    head = found(TargetShape.of(model.config, "tiny"), found.Config(depths=3, **sizes))
    return head.to(model.device, torch.float64).eval().requires_grad_(False)


def decoder(kind: str, saved: bool | None = True, family: str = "llama", **more: Any) -> LLM:
    config = {"num_speculative_tokens": 3, **dict(speculation(kind)), **more.pop("config", {})}
    limits = {"max_num_seqs": 3, "max_model_len": CONTEXT, "compile": False}
    return LLM(
        target(family),
        speculative_config=config,
        enable_prefix_caching=saved,
        **{**limits, **more},
    )


def played(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams | None = None, **more: Any
) -> list[EngineRequest]:
    found = [llm.requests(prompt, params or greedy(12), **more) for prompt in prompts]
    requests = [one for group in found for one in group]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    return requests


@contextmanager
def drafts_of(llm: LLM) -> Iterator[list[Any]]:
    """Collects what is drafted in each round."""
    found: list[Any] = []

    def note(round: Any) -> None:
        counts = round.proposal.counts.tolist()
        pairs = zip(round.proposal.tokens.tolist(), counts, strict=True)
        found.append([tokens[:count] for tokens, count in pairs])

    with llm.engine.observing(note):
        yield found


def texts(requests: Sequence[EngineRequest]) -> list[list[int]]:
    return [one.output_ids for one in requests]


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_turn_reads_its_new_tokens_only(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, other = decoder(kind), decoder(kind, saved=False)
    (first,) = played(llm, [FIRST])
    turn = [*first.token_ids, 7, 7]
    read, entries = [], []
    target_of: Any = llm.engine.target
    prefill = target_of.prefill
    monkeypatch.setattr(
        target_of,
        "prefill",
        lambda *given: [read.extend(part.tokens) or part for part in prefill(*given)],  # type: ignore[func-returns-value]
    )
    cache: Any = getattr(llm.engine.drafter, "_cache", None)
    if cache is not None:
        append = cache.append
        monkeypatch.setattr(
            cache,
            "append",
            lambda rows, more, counts: entries.append(sum(counts)) or append(rows, more, counts),
        )
    before: list[int] = []
    score = target_of.score
    monkeypatch.setattr(target_of, "score", lambda plan: before.append(sum(entries)) or score(plan))
    (again,) = played(llm, [turn])
    (apart,) = played(other, [turn])
    assert texts([again]) == texts([apart]) == plain("llama", 12, (tuple(turn),))
    # The last token of a text is never cached: nothing has followed it.
    assert (again.cached_tokens, apart.cached_tokens) == (first.length - 1, 0)
    if kind not in STATELESS:  # whose first pass reads them
        assert [token for part in read for token in part] == [turn[first.length - 1], 7]
    assert before[0] <= 2, "the head's entries after what it has kept, the root's among them"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drafted_is_what_would_have_been(kind: str) -> None:
    """The head has read the same, sooner: in batches, at turns that go on and at ones that have
    only their beginning from an earlier text."""
    found: dict[bool, list[Any]] = {}
    for saved in (True, False):
        llm = decoder(kind, saved)
        with drafts_of(llm) as found[saved]:
            first, second = played(llm, [FIRST, FIRST[::-1]])
            turns = [
                [*first.token_ids, 7, 7],
                [*first.token_ids[:20], 9, 8, *range(20)],
                second.token_ids[:24],
            ]
            requests = played(llm, turns)
            again = played(llm, [[*requests[1].token_ids, 4], [*requests[0].token_ids, 4, 2, 4]])
        assert all(bool(one.cached_tokens) is saved for one in [*requests, *again])
        found[saved] = [found[saved], texts([first, second, *requests, *again])]
    assert found[True] == found[False]


@pytest.mark.parametrize("kind", ["medusa", "hydra-prefix", "eagle", "dflash"])
def test_a_beginning_in_common_is_read_to_its_last_token(kind: str) -> None:
    llm = decoder(kind)
    (first,) = played(llm, [FIRST])
    whole, part, shorter = played(
        llm, [[*first.token_ids, 7, 7], [*first.token_ids[:20], 9, 8], first.token_ids[:20]]
    )
    assert whole.cached_tokens == first.length - 1
    # An entry of EAGLE follows from the token after its own, too.
    assert part.cached_tokens == (19 if kind == "eagle" else 20)
    assert shorter.cached_tokens == 18, "the first draft goes on from what the target says there"


@pytest.mark.parametrize("kind", ["medusa", "hydra-prefix", "eagle3", "dflash"])
def test_sampled_texts_are_the_same(kind: str) -> None:
    """A text with a seed of its own reads all of its prompt, as a draft model does: what is drafted
    for it follows from it alone."""
    llm, other = decoder(kind), decoder(kind, saved=False)
    (first,), (alike,) = played(llm, [FIRST], SAMPLED), played(other, [FIRST], SAMPLED)
    turn = [*first.token_ids, 7, 7]
    (again,), (apart,) = played(llm, [turn], SAMPLED), played(other, [turn], SAMPLED)
    assert texts([first, again]) == texts([alike, apart])
    assert again.cached_tokens == 0
    unseeded = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
    assert played(llm, [turn], unseeded)[0].cached_tokens == len(turn) - 2


@pytest.mark.parametrize("kind", ["eagle", "clover-prefix", "dflash", "medusa"])
def test_samples_of_a_prompt_share_what_was_taken_over(kind: str) -> None:
    llm, other = decoder(kind), decoder(kind, saved=False)
    (first,) = played(llm, [FIRST])
    turn = [*first.token_ids, 7, 7]
    three = SamplingParams(n=3, temperature=0.0, max_tokens=8, ignore_eos=True)
    with drafts_of(llm) as drafted:
        again = played(llm, [turn], three)
    with drafts_of(other) as expected:
        apart = played(other, [turn], three)
    assert (texts(again), drafted) == (texts(apart), expected)
    assert [one.cached_tokens for one in again] == [first.length - 1, *[len(turn) - 1] * 2]


@pytest.mark.parametrize("kind", ["hydra-prefix", "eagle", "dflash"])
def test_the_shorter_of_what_target_and_head_have_is_used(kind: str) -> None:
    """A head that drafted without the beginning of a text would draft another one."""
    llm, other = decoder(kind), decoder(kind, saved=False)
    (first,) = played(llm, [FIRST])
    drafting: Any = llm.engine.drafter
    turn = [*first.token_ids, 7, 7]
    expected = played(other, [turn])
    kept = drafting._prefixes._texts
    ((tokens, saved),) = kept._texts.items()
    kept.clear()
    slots = [slots[:, :17] for slots in saved.slots]
    kept.add(tokens[: 17 + saved.ahead], type(saved)(slots, ahead=saved.ahead))
    (again,) = played(llm, [turn])
    assert again.cached_tokens == 17
    drafting.forget_texts()
    (nothing,) = played(llm, [turn])
    assert nothing.cached_tokens == 0
    llm.engine.target.forget_texts()
    (neither,) = played(llm, [turn])
    assert neither.cached_tokens == 0
    assert texts([again, nothing, neither]) == texts(expected) * 3


@pytest.mark.parametrize("kind", ["eagle3", "ctc-prefix", "dflash"])
def test_as_many_texts_stay_as_the_target_keeps(kind: str) -> None:
    llm = decoder(kind, max_num_seqs=2)
    prompts = [[first, *FIRST] for first in range(4)]
    ended = played(llm, prompts)
    later = [played(llm, [[*one.token_ids, 7, 7]])[0] for one in ended[::-1]]
    assert [bool(one.cached_tokens) for one in later[:2]] == [True, True]
    assert [bool(one.cached_tokens) for one in later[2:]] == [False, False]
    llm.forget_texts()
    held: Any = llm.engine.drafter
    assert held._prefixes.nbytes == 0
    assert played(llm, [[*ended[3].token_ids, 7, 7]])[0].cached_tokens == 0


@pytest.mark.parametrize(
    ("caching", "kind"),
    representatives(
        itertools.product([True, False], ["eagle3", "hydra-prefix", "medusa", "dflash"]),
        lambda caching, kind: caching or kind == "eagle3",
    ),
)
def test_a_text_that_is_put_aside_goes_on_where_it_was(kind: str, caching: bool) -> None:
    prompts = [[first, *FIRST] for first in range(3)]
    length = greedy(90)
    free = decoder(kind, saved=caching)
    short = decoder(kind, caching, max_batch_total_tokens=300, max_num_batched_tokens=6)
    expected, found = played(free, prompts, length), played(short, prompts, length)
    assert texts(found) == texts(expected)
    assert sum(one.preemptions for one in found) > 0


@pytest.mark.parametrize("kind", ["eagle", "clover-prefix", "dflash"])
def test_a_text_that_is_stopped_in_the_middle_of_a_draft_is_gone_on_from(kind: str) -> None:
    """The target has read some tokens after its end, and nobody goes on from these."""
    llm, other = decoder(kind), decoder(kind, saved=False)
    (whole,) = played(other, [FIRST], greedy(12))
    for count in range(1, 9):
        (cut,) = played(llm, [FIRST], greedy(count))
        assert cut.output_ids == whole.output_ids[:count]
        for more in ([5, 4], [whole.output_ids[count], 4]):
            turn = [*cut.token_ids, *more]
            with drafts_of(llm) as drafted:
                (again,) = played(llm, [turn])
            with drafts_of(other) as expected:
                (apart,) = played(other, [turn])
            assert (texts([again]), drafted) == (texts([apart]), expected)
            assert again.cached_tokens
        llm.forget_texts()


def test_conversations_stay_by_default_and_other_texts_do_not() -> None:
    llm = decoder("eagle", saved=None)
    (said,) = played(llm, [FIRST], keep_cached=True)
    (other,) = played(llm, [FIRST[::-1]])
    turns = [[*said.token_ids, 7, 7], [*other.token_ids, 7, 7]]
    on, off = (played(llm, [turn], keep_cached=True)[0] for turn in turns)
    assert (on.cached_tokens, off.cached_tokens) == (said.length - 1, 0)
    assert played(llm, [turns[0]])[0].cached_tokens == 0, "which is no conversation"


def test_without_prefix_caching_nothing_is_kept() -> None:
    llm = decoder("eagle", saved=False)
    played(llm, [FIRST], keep_cached=True)
    held: Any = llm.engine.drafter
    assert (held._prefixes.nbytes, llm.engine.target.has_prefix_cache) == (0, False)


def test_an_interrupted_step_forgets_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = decoder("eagle")
    (first,) = played(llm, [FIRST])
    (request,) = llm.requests([*first.token_ids, 7, 7], greedy(12))
    llm.engine.add(request)
    llm.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.target, "score", lambda plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.engine.step()
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert (
        request.output_ids
        == played(decoder("eagle", saved=False), [request.prompt_ids])[0].output_ids
    )


def test_a_head_among_others_takes_over_as_well() -> None:
    """Look-ups and a draft model need no states; the head says how much is taken over."""
    children = [dict(speculation("eagle")), {"model": drafter("llama")}, {"method": "ngram"}]
    config = {"method": "ucb", "drafters": children}
    both: list[list[EngineRequest]] = []
    for saved in (True, False):
        llm = LLM(
            target("llama"),
            speculative_config={"num_speculative_tokens": 3, **config},
            max_num_seqs=3,
            max_model_len=CONTEXT,
            compile=False,
            enable_prefix_caching=saved,
        )
        (first,) = played(llm, [FIRST])
        both.append(played(llm, [[*first.token_ids, 7, 7], [*first.token_ids[:20], 9, 8]]))
    assert texts(both[0]) == texts(both[1])
    assert [one.cached_tokens for one in both[0]] == [first.length - 1, 19]


def test_a_head_that_learns_online_takes_over_as_well() -> None:
    llm = decoder("eagle", config={"online": {"every": 2}})
    (first,) = played(llm, [FIRST])
    turn = [*first.token_ids, 7, 7]
    (again,) = played(llm, [turn])
    assert again.cached_tokens == first.length - 1
    assert texts([again]) == plain("llama", 12, (tuple(turn),))


@pytest.mark.parametrize("family", ["mamba", "gemma3"])
@pytest.mark.parametrize("method", ["eagle", "hydra", "dflash"])
def test_other_kinds_of_targets(family: str, method: str) -> None:
    """A target with states goes on from where its texts ended, or where their prompts did."""
    options = find_drafter(method).dummy_options(LoadedModel(target(family), None, family))
    config = {"method": method, "num_speculative_tokens": 3, **options}
    both = [
        LLM(
            target(family),
            speculative_config=config,
            max_num_seqs=3,
            max_model_len=CONTEXT,
            enable_prefix_caching=saved,
        )
        for saved in (True, False)
    ]
    (first,) = played(both[0], [FIRST])
    turns = [[*first.token_ids, 7, 7], [*FIRST, 9, 8]]
    found = [played(llm, turns) for llm in both]
    assert texts(found[0]) == texts(found[1])
    assert found[0][0].cached_tokens == first.length - 1
    assert found[0][1].cached_tokens >= len(FIRST) - 1
