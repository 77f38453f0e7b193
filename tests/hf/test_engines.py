"""What one ``custom_generate`` function keeps from call to call, and what it leaves as it was."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.config import SpeculativeConfig
from outpace.errors import ConfigError
from outpace.hf import speculative
from outpace.targets.hf.model_snapshot import _parts, recorded_parts
from targets.families import build, noised, target

from .generating import FAMILY, NEW, ONE, PAD, Recorder, faster, generated


def test_a_second_call_uses_the_same_engine_and_a_larger_batch_a_larger_one() -> None:
    custom = faster()
    generated("one", custom)
    first = custom._llm
    generated("one", custom)
    assert custom._llm is first
    assert torch.equal(generated("ragged", custom), generated("ragged"))
    assert custom._llm is not first
    assert torch.equal(generated("one", custom), generated("one"))


def test_one_callable_serves_several_models() -> None:
    custom = speculative(method="ngram")
    for name in ("llama", "gpt2"):
        model = target(name)
        settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
        expected = model.generate(ONE, **settings)
        assert torch.equal(model.generate(ONE, custom_generate=custom, **settings), expected)


def test_training_mode_is_left_as_it_was() -> None:
    model = build(FAMILY)
    expected = model.generate(ONE, max_new_tokens=4, do_sample=False)
    model.train()
    model.model.layers[0].eval()
    made = model.generate(
        ONE, max_new_tokens=4, do_sample=False, custom_generate=speculative(method="ngram")
    )
    assert torch.equal(made, expected)
    assert model.training
    assert model.model.layers[1].training
    assert not model.model.layers[0].training


def test_a_drafter_that_is_in_training_drafts_and_stays_so() -> None:
    small = noised(target(FAMILY), 0.1)
    custom = speculative(small, num_speculative_tokens=3)
    for _ in range(2):
        small.train()
        small.model.layers[0].eval()
        assert torch.equal(generated(custom=custom), generated())
        assert small.training
        assert small.model.layers[1].training
        assert not small.model.layers[0].training


def test_an_interrupted_call_leaves_the_next_one_whole() -> None:
    class Impatient(Recorder):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.pieces) > 3:
                raise KeyboardInterrupt

    custom = faster()
    with pytest.raises(KeyboardInterrupt):
        generated(custom=custom, streamer=Impatient())
    assert torch.equal(generated(custom=custom), generated())


def test_the_metrics_say_what_each_row_cost() -> None:
    custom = faster()
    generated(custom=custom)
    assert len(custom.metrics) == 4
    accepted = sum(metrics.num_accepted_tokens for metrics in custom.metrics)
    assert 0 < accepted < sum(metrics.num_draft_tokens for metrics in custom.metrics)


def test_the_number_of_drafted_tokens_is_chosen_unless_it_is_given() -> None:
    default = inspect.signature(speculative).parameters["num_speculative_tokens"].default
    assert default == SpeculativeConfig().num_speculative_tokens == "auto"
    assert torch.equal(generated(custom=speculative(method="ngram")), generated())


def test_names_of_transformers_are_taken_here_too() -> None:
    given = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic"}
    assert torch.equal(generated(custom=speculative(method="ngram", **given)), generated())
    with pytest.raises(ConfigError, match="the same thing: give one of the two"):
        speculative(method="ngram", num_speculative_tokens=3, **given)


def test_caches_that_are_replaced_are_freed_at_once() -> None:
    caches: list[weakref.ref[Any]] = []
    custom = speculative(method="ngram", num_speculative_tokens=3)
    gc.collect()
    gc.disable()
    try:
        for rows, name in ((1, "llama"), (3, "llama"), (3, "gpt2"), (2, "llama")):
            ids = ONE.expand(rows, -1)
            target(name).generate(ids, custom_generate=custom, max_new_tokens=3, pad_token_id=PAD)
            caches.append(weakref.ref(custom._llm.engine.target.runner.cache))  # type: ignore[union-attr]
        assert [cache() is not None for cache in caches] == [False, False, False, True]
    finally:
        gc.enable()


CHANGES: dict[str, Any] = {
    "attention": lambda model: model.set_attn_implementation("eager"),
    "window": lambda model: setattr(model.config, "sliding_window", 3),
    "dtype": lambda model: model.float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_may_be_changed_between_calls(change: str) -> None:
    model, custom = build("mistral"), speculative(method="ngram", num_speculative_tokens=3)
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
    before = model.generate(ONE, custom_generate=custom, **settings)
    assert torch.equal(before, model.generate(ONE, **settings))
    CHANGES[change](model)
    after = model.generate(ONE, custom_generate=custom, **settings)
    assert torch.equal(after, model.generate(ONE, **settings))


@pytest.mark.parametrize("change", CHANGES)
def test_a_drafter_may_be_changed_between_calls(change: str) -> None:
    small = build("mistral")
    custom = speculative(small, num_speculative_tokens=3)
    assert torch.equal(generated(custom=custom), generated())
    CHANGES[change](small)
    assert torch.equal(generated(custom=custom), generated())


def larger(model: Any) -> None:
    model.resize_token_embeddings(96, mean_resizing=False)
    with torch.no_grad():
        torch.manual_seed(1)
        model.lm_head.weight.normal_(0, 0.5)


def adapted(model: Any) -> None:
    """Wraps a linear layer of a recurrent one, as adapters do."""
    block = model.model.layers[0].linear_attn
    block.out_proj = torch.nn.Sequential(block.out_proj, torch.nn.Hardswish())


REBUILT: dict[str, tuple[str, Callable[[Any], None]]] = {
    "vocabulary": ("llama", larger),
    "adapter": ("qwen3_next", adapted),
}


@pytest.mark.parametrize("name", REBUILT)
def test_a_model_may_be_rebuilt_between_calls(name: str) -> None:
    family, change = REBUILT[name]
    model, custom = build(family), speculative(method="ngram", num_speculative_tokens=3)
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
    before = model.generate(ONE, custom_generate=custom, **settings)
    change(model)
    expected = model.generate(ONE, **settings)
    assert not torch.equal(before, expected), "the change should show"
    assert torch.equal(model.generate(ONE, custom_generate=custom, **settings), expected)


def trained(model: Any) -> None:
    """Changes weights where they are, as an optimizer does."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.neg_()


def test_a_model_may_be_trained_between_calls() -> None:
    model, ids = build(FAMILY), torch.arange(3, 43)[None]  # long enough for a cache to be kept
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
    small = noised(target(FAMILY), 0.1)
    customs = [speculative(method="ngram"), speculative(small, num_speculative_tokens=3)]
    before = model.generate(ids, **settings)
    for custom in customs:
        assert torch.equal(model.generate(ids, custom_generate=custom, **settings), before)
    trained(model)
    after = model.generate(ids, **settings)
    assert not torch.equal(before, after), "the change should show"
    for custom in customs:
        assert torch.equal(model.generate(ids, custom_generate=custom, **settings), after)
    small.load_state_dict(model.state_dict())
    assert torch.equal(model.generate(ids, custom_generate=customs[1], **settings), after)
    (metrics,) = customs[1].metrics
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 0


class Adapted(torch.nn.Module):
    """What says of peft's modules whether adapters are on."""

    _disable_adapters = False

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base


def test_what_recorded_passes_compute_with_is_seen_to_change() -> None:
    model = build(FAMILY)
    first = _parts(model)
    trained(model)
    assert _parts(model) == first
    projection = model.model.layers[0].self_attn.v_proj
    projection.weight.data = projection.weight.data.clone()
    moved = _parts(model)
    model.model.layers[0].self_attn.v_proj = Adapted(projection)
    beside = _parts(model)
    model.model.layers[0].self_attn.v_proj._disable_adapters = True
    assert beside != moved
    moved = beside
    assert len({first, moved, _parts(model)}) == 3
    assert recorded_parts(model) is None  # nothing is recorded on a CPU


def test_a_moved_weight_makes_a_new_engine_where_passes_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outpace.hf.recorded_parts", _parts)
    model, custom = build(FAMILY), speculative(method="ngram", num_speculative_tokens=3)
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": PAD}
    model.generate(ONE, custom_generate=custom, **settings)
    first = custom._llm
    trained(model)
    model.generate(ONE, custom_generate=custom, **settings)
    assert custom._llm is first
    weight = model.lm_head.weight
    weight.data = weight.data.clone()
    model.generate(ONE, custom_generate=custom, **settings)
    assert custom._llm is not first


def test_autocast_may_begin_and_end_between_calls() -> None:
    model, custom = build(FAMILY).float(), speculative(method="ngram", num_speculative_tokens=3)
    ids = ONE.expand(2, -1)
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            made = model.generate(ids, custom_generate=custom, **settings)
            assert torch.equal(made, model.generate(ids, **settings))
