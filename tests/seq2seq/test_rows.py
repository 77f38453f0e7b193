"""Rows of an encoder-decoder: sources are read once, rows come and go, steps are interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace import LLM, SamplingParams
from outpace.core.request import EncoderInputs
from outpace.draft.registry import drafter_names, find_drafter
from outpace.errors import OutpaceError
from outpace.targets.base import PromptInputs
from outpace.targets.hf.lock import model_lock
from outpace.targets.hf.seq2seq.cross_attention import CrossAttentionCache
from outpace.targets.hf.target import HFTarget
from representatives import representatives
from seq2seq.models import CONTEXT, PROMPTS, drafter, plain, target

LENGTH = 8
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH)
FIVE = [PROMPTS[row] for row in (0, 2, 1, 2, 0)]


def speaking(method: str = "draft_model", **options: Any) -> LLM:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if "verify" in options:
        config["verify"] = options.pop("verify")
    if method != "none":
        config["model"] = drafter("bart")
    return LLM(target("bart"), speculative_config=config, max_model_len=CONTEXT, **options)


def ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def sources_read(model: Any) -> tuple[list[int], Any]:
    """Counts the tokens of each source that the model's encoder reads from now on."""
    read: list[int] = []
    hook = model.get_encoder().register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    return read, hook


def play(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests:
        llm.engine.step()


def test_rows_come_and_go() -> None:
    llm = speaking(max_num_seqs=2)
    expected = [plain(target("bart"), row, length=LENGTH) for row in (0, 2, 1, 2, 0)]
    lengths = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 8, 5, 1, 8)]
    found = ids(llm.generate(FIVE, lengths))
    assert found == [text[:n] for text, n in zip(expected, (3, 8, 5, 1, 8), strict=True)]
    held: Any = llm.engine.target
    assert held.runner.sources.nbytes == 0


def test_samples_of_one_prompt_read_its_source_once() -> None:
    llm = speaking("none")
    params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=LENGTH)
    read, hook = sources_read(target("bart"))
    with hook:
        several = llm.generate(PROMPTS[2], params)[0].outputs
    assert read == [len(PROMPTS[2])]
    assert len({tuple(output.token_ids) for output in several}) == 3
    alone = SamplingParams(temperature=1, seed=3, max_tokens=LENGTH)
    assert llm.generate(PROMPTS[2], alone)[0].token_ids == several[0].token_ids


def test_sources_are_read_within_the_budget() -> None:
    llm = speaking("none", max_num_batched_tokens=4)
    requests = [llm.requests(prompt, GREEDY)[0] for prompt in FIVE[:3]]
    for request in requests:
        llm.engine.add(request)
    read, hook = sources_read(target("bart"))
    with hook:
        llm.engine.step()
        assert read == [5]  # the first, which is longer than the budget; the others wait
        llm.engine.step()
        assert read == [5, 12]
        play(llm)
    assert read == [5, 12, 1]
    expected = [plain(target("bart"), row, length=LENGTH) for row in (0, 2, 1)]
    assert [request.output_ids for request in requests] == expected


@pytest.mark.parametrize("after", [1, 2, 4])
def test_an_interruption_costs_no_text(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = speaking()
    requests = [llm.requests(prompt, GREEDY)[0] for prompt in PROMPTS]
    for request in requests:
        llm.engine.add(request)
    passes = 0
    forward = type(target("bart")).forward

    def interrupted(self: Any, **options: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == after * 3:
            raise KeyboardInterrupt
        return forward(self, **options)

    monkeypatch.setattr(type(target("bart")), "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        play(llm)
    play(llm)
    monkeypatch.undo()
    expected = [plain(target("bart"), row, length=LENGTH) for row in range(3)]
    assert [request.output_ids for request in requests] == expected


def test_a_seed_gives_one_text_whatever_is_drafted() -> None:
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=LENGTH) for seed in (1, 2, 3)]
    expected = ids(speaking("none", verify="coupled").generate(PROMPTS, params))
    assert ids(speaking(verify="coupled").generate(PROMPTS, params)) == expected


REFUSED = ("layer_skip", "early_exit", "hidden_transfer", "pass", "gemma4_assistant")
OTHERS = [name for name in drafter_names() if name not in {*REFUSED, "draft_model", "none"}]
SOME = ("draft_tree", "ngram", "suffix", "lookahead", "medusa", "eagle", "eagle3", "staged")


def drafting(method: str) -> LLM:
    """What the tests of the contract build, for a T5."""
    loaded = LLM(target("t5")).target
    options = find_drafter(method).dummy_options(loaded)
    config = {"method": method, "num_speculative_tokens": 3, **options}
    return LLM(target("t5"), speculative_config=config, max_model_len=CONTEXT)


@pytest.mark.parametrize("method", representatives(OTHERS, SOME))
def test_every_way_to_draft_changes_no_word(method: str) -> None:
    found = ids(drafting(method).generate(PROMPTS, GREEDY))
    assert found == [plain(target("t5"), row, length=LENGTH) for row in range(3)]


@pytest.mark.parametrize("method", REFUSED)
def test_or_is_refused(method: str) -> None:
    with pytest.raises(OutpaceError, match="encoder-decoder"):
        drafting(method).generate(PROMPTS[:1], GREEDY)


# -- other threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["encode", "compute_logits", "read"])
def test_nobody_else_computes_while_a_pass_has_the_models_head_hooked(what: str) -> None:
    """A pass lets the head see its last columns only, and so does the encoding of a source."""
    model = target("bart")
    made = HFTarget(model, rows=1, max_length=CONTEXT)
    made.admit(PromptInputs([2], source=EncoderInputs(PROMPTS[0])))
    states = torch.zeros(1, 3, model.config.d_model, dtype=torch.float64)
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: made.runner.sources.encode(0, 9),
        "compute_logits": lambda: made.compute_logits(states),
        "read": lambda: made.runner.model.read(states, torch.zeros(1, 1, dtype=torch.long)),
    }
    with ThreadPoolExecutor(1) as pool:
        with model_lock(model):
            waiting = pool.submit(calls[what])
            _, waits = wait([waiting], timeout=0.3)
            assert waits
        waiting.result(timeout=30)


# -- keys and values of sources --------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 9)),
        st.tuples(st.just("fork"), st.integers(0, 3)),
        st.tuples(st.just("retain"), st.sets(st.integers(0, 3))),
    ),
    max_size=12,
)


@given(STEPS)
def test_a_cache_holds_what_was_put_into_it(steps: Sequence[tuple[str, Any]]) -> None:
    cache, known = CrossAttentionCache(rows=4), list[torch.Tensor]()
    for number, (what, value) in enumerate(steps):
        if what == "put" and len(known) < 4:
            source = torch.full((2, value, 3), float(number + 1))
            cache.admit(1)
            cache.put(len(known), [(source, -source)] * 2)
            known.append(source)
        elif what == "fork" and value < len(known) < 4:
            cache.fork(value)
            known.append(known[value])
        elif what == "retain":
            kept = sorted(row for row in value if row < len(known))
            cache.retain(kept)
            known = [known[row] for row in kept]
        assert cache.active == len(known)
    for first in range(len(known)):
        rows = known[first:]
        seen = cache.seen(first, len(rows))
        assert seen.slots == max(source.shape[1] for source in rows)
        for row, source in enumerate(rows):
            own = source.shape[1]
            for layer in seen.layers:
                assert torch.equal(layer.keys[row, :, :own], source)
                assert torch.equal(layer.values[row, :, :own], -source)
            assert seen.visible is None or seen.visible[row].sum() == own
            assert seen.visible is not None or own == seen.slots
