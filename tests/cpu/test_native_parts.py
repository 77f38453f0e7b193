"""Parts of a model in our own code: the numbers of transformers' modules without the others."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.targets.base import SubLayers
from outpace.targets.cpu import native
from outpace.targets.cpu.kernels import speed_up
from outpace.targets.cpu.native_layers.layer import use_native_layers
from outpace.targets.cpu.native_layers.linear import lay_out_weights, share_products
from outpace.targets.cpu.native_layers.model import NativeModel, use_native_model
from outpace.targets.hf.partial.parts import LowerLayers, UpperLayers, WithoutSubLayers
from outpace.targets.hf.runner import Runner

pytestmark = pytest.mark.skipif(native.native() is None, reason="no C++ compiler here")

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3]]
NEXT = torch.tensor([[5, 8, 9], [7, 9, 3]])


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """Returns a model in transformers' code and the same in ours."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
    )
    plain = LlamaForCausalLM(config).eval()
    ours = copy.deepcopy(plain)
    speed_up(ours, "native")
    lay_out_weights(ours)
    share_products(ours)
    use_native_layers(ours)
    assert use_native_model(ours)
    return plain, ours


def read(model: Any) -> Runner:
    runner = Runner(model, rows=2, max_length=64)
    runner.admit(2)
    for row, prompt in enumerate(PROMPTS):
        runner.prefill(row, [prompt])
    return runner


@pytest.fixture(autouse=True)
def _nothing_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if our code hands a pass of few tokens to transformers'."""
    plain = NativeModel.plain

    def refuse(self: NativeModel, **options: Any) -> Any:
        cached = options.get("past_key_values") is not None
        assert not (cached and options["input_ids"].shape == NEXT.shape)
        return plain(self, **options)

    monkeypatch.setattr(NativeModel, "plain", refuse)


@pytest.mark.parametrize(
    "skipped",
    [
        SubLayers(frozenset({1, 3}), frozenset()),
        SubLayers(frozenset({0}), frozenset({2})),
        SubLayers.whole([0, 2]),
    ],
)
def test_parts_of_layers_are_left_out(models: tuple[Any, Any], skipped: SubLayers) -> None:
    found = [
        read(model).forward(NEXT, keep=3, through=WithoutSubLayers(model, skipped)).logits
        for model in models
    ]
    whole = read(models[0]).forward(NEXT, keep=3).logits
    assert torch.allclose(*found, atol=1e-4)
    assert not torch.allclose(found[0], whole, atol=1e-2)


@pytest.mark.parametrize("count", [1, 3])
def test_upper_layers_go_on_from_the_lower_ones(models: tuple[Any, Any], count: int) -> None:
    plain, ours = models
    shortened = copy.deepcopy(plain)
    shortened.model.layers = shortened.model.layers[:count]
    expected = read(shortened).forward(NEXT, keep=3).logits
    runner = read(ours)
    lower = LowerLayers(ours, count)
    assert torch.allclose(runner.forward(NEXT, 3, through=lower).logits, expected, atol=1e-4)
    states = lower.states.clone()
    upper = partial(UpperLayers(ours, count), states=states)
    whole = read(plain).forward(NEXT, keep=3).logits
    assert torch.allclose(runner.forward(NEXT, 3, through=upper).logits, whole, atol=1e-4)
    assert torch.equal(lower.states, states)
    stopping = LowerLayers(ours, count, stops=True)
    assert runner.forward(NEXT, 3, through=stopping).logits.shape == (2, 3, 0)
    assert torch.equal(stopping.states, states)
