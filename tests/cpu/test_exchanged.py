"""Modules that somebody exchanges in a model that our own code computes: it notices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cpu.test_native import made, play
from outpace.targets.base import SubLayers
from outpace.targets.cpu.native import native
from outpace.targets.cpu.native_layers.linear import fuse_products
from outpace.targets.cpu.native_layers.model import NativeModel
from outpace.targets.hf.partial.parts import LowerLayers, WithoutSubLayers
from outpace.targets.hf.runner import Runner

pytestmark = pytest.mark.skipif(native() is None, reason="no C++ compiler here")

TOKENS = torch.tensor([[5, 8, 9], [7, 9, 3]])


class Adapted(nn.Module):
    """A layer with an adapter, as peft wraps one: what it shows as its weight is the layer's."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        torch.manual_seed(7)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        found: Tensor = self.base_layer.weight
        return found

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base_layer(x) + self.up(self.down(x))
        return found


def adapted(path: str, name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        parent = model.get_submodule(path)
        setattr(parent, name, Adapted(getattr(parent, name)))

    return change


def scaled(path: str) -> Callable[[Any], None]:
    """Exchanges only the function, as accelerate and others do."""

    def change(model: Any) -> None:
        module = model.get_submodule(path)
        own = module.forward
        module.forward = lambda *args, **options: own(*args, **options) * 1.5

    return change


def biased(model: Any) -> None:
    for path in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"):
        layer = model.get_submodule(path)
        torch.manual_seed(9)
        layer.bias = nn.Parameter(torch.randn(layer.out_features), requires_grad=False)


def another_norm(model: Any) -> None:
    norm = copy.deepcopy(model.model.layers[1].input_layernorm)
    norm.weight.data.mul_(1.7)
    model.model.layers[1].input_layernorm = norm


def other_embeddings(model: Any) -> None:
    torch.manual_seed(8)
    model.model.embed_tokens = nn.Embedding(101, 64)


CHANGES: dict[str, Callable[[Any], None]] = {
    "query": adapted("model.layers.0.self_attn", "q_proj"),
    "value": adapted("model.layers.1.self_attn", "v_proj"),
    "down": adapted("model.layers.1.mlp", "down_proj"),
    "head": adapted("", "lm_head"),
    "bias": biased,
    "norm": another_norm,
    "embeddings": other_embeddings,
    "forward of a product": scaled("model.layers.0.mlp.up_proj"),
    "forward of an activation": scaled("model.layers.0.mlp.act_fn"),
    "forward of a layer's part": scaled("model.layers.1.mlp"),
}


def logits(model: Any, through: Any = None) -> Tensor:
    runner = Runner(model, rows=2, max_length=64)
    runner.admit(2)
    runner.prefill(0, [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3]])
    found: Tensor = runner.forward(TOKENS, keep=3, through=through).logits
    return found


@pytest.mark.parametrize("played_before", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", CHANGES)
@torch.inference_mode()
def test_what_is_exchanged_counts(name: str, whole: bool, played_before: bool) -> None:
    plain = made("llama")
    ours: Any = copy.deepcopy(plain)
    play(ours, whole)
    fuse_products(ours)
    before = logits(plain)
    if played_before:
        torch.testing.assert_close(logits(ours), before, rtol=0, atol=1e-4)
    for model in (plain, ours):
        CHANGES[name](model)
    expected = logits(plain)
    assert not torch.allclose(expected, before, atol=1e-2)
    for model in (ours, copy.deepcopy(ours)):
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-4)
    if whole and name != "bias":
        assert ours.forward.max_invariant_tokens == 0


@torch.inference_mode()
def test_parts_of_a_model_notice_it_as_well() -> None:
    plain = made("llama")
    ours: Any = copy.deepcopy(plain)
    play(ours, whole=True)
    skipped = SubLayers(frozenset({0}), frozenset({1}))
    parts = [(LowerLayers(model, 1), WithoutSubLayers(model, skipped)) for model in (plain, ours)]
    before = [logits(plain, part) for part in parts[0]]
    for model in (plain, ours):
        CHANGES["query"](model)
        CHANGES["value"](model)
    for own, other, then in zip(*parts, before, strict=True):
        expected = logits(plain, own)
        assert not torch.allclose(expected, then, atol=1e-2)
        torch.testing.assert_close(logits(ours, other), expected, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_what_is_put_back_is_computed_by_our_own_code_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours: Any = made("llama")
    play(ours, whole=True)
    expected, attention = logits(ours), ours.model.layers[0].self_attn
    own = attention.q_proj
    attention.q_proj = Adapted(own)
    assert not torch.allclose(logits(ours), expected, atol=1e-2)
    attention.q_proj = own
    monkeypatch.setattr(NativeModel, "plain", None)
    assert torch.equal(logits(ours), expected)
