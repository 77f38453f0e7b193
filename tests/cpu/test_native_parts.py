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
from outpace.targets.cpu.native_layers import passes
from outpace.targets.cpu.native_layers.layer import use_native_layers
from outpace.targets.cpu.native_layers.linear import fuse_products, prepack_weights
from outpace.targets.cpu.native_layers.model import NativeModel, use_native_model
from outpace.targets.cpu.weights.layers import hooks_of
from outpace.targets.cpu.weights.weight import LINE
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
    return plain, in_our_code(plain)


def in_our_code(plain: Any) -> Any:
    ours = copy.deepcopy(plain)
    speed_up(ours, "native")
    prepack_weights(ours)
    fuse_products(ours)
    use_native_layers(ours)
    assert use_native_model(ours)
    return ours


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
        SubLayers.of_layers([0, 2]),
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


def test_layers_of_different_sizes_share_enough_memory_to_work_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The products of one need the most room, and the rounded activations of the other."""
    rooms: list[tuple[torch.Tensor, int]] = []
    describe = passes._describe_pass

    def guarded(given: passes.PassInputs, head_stride: int, scratch: int) -> Any:
        made = describe(given, head_stride, scratch)
        size = scratch + LINE
        rooms.append((torch.full((size + 4096,), 7.0), size))
        made.struct.scratch = rooms[-1][0].data_ptr()
        return made

    monkeypatch.setattr(passes, "_describe_pass", guarded)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        initializer_range=0.15,
    )
    plain = LlamaForCausalLM(config).eval()
    attention, mlp = plain.model.layers[1].self_attn, plain.model.layers[1].mlp
    attention.num_key_value_groups = 1
    attention.q_proj, attention.o_proj = (linear(*sizes) for sizes in ((32, 64), (64, 32)))
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = (
        linear(*sizes) for sizes in ((32, 176), (32, 176), (176, 32))
    )
    ours = in_our_code(plain)
    found = [read(model).forward(NEXT, keep=3).logits for model in (plain, ours)]
    assert torch.allclose(*found, atol=1e-4)
    assert rooms
    assert all(bool((room[size:] == 7.0).all()) for room, size in rooms)


@pytest.mark.parametrize(
    ("heads", "groups", "dim"), [(7, 1, 128), (8, 2, 80), (5, 1, 48), (2, 2, 192)]
)
def test_queries_that_share_a_key_head_go_together(heads: int, groups: int, dim: int) -> None:
    """As many at once as there are registers for, and the rest in smaller parties; more slots than
    are worked out at once."""
    torch.manual_seed(6)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=16 * heads,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=dim,
        initializer_range=0.15,
    )
    plain = LlamaForCausalLM(config).eval()
    ours = in_our_code(plain)
    text = torch.randint(0, 101, (1, 150)).tolist()[0]
    found = []
    for model in (plain, ours):
        runner = Runner(model, rows=1, max_length=256)
        runner.admit(1)
        runner.prefill(0, [text])
        found.append(runner.forward(torch.tensor([[5, 8, 9]]), keep=3).logits)
    assert torch.allclose(*found, atol=1e-3)


def linear(inputs: int, outputs: int) -> torch.nn.Linear:
    return torch.nn.Linear(inputs, outputs, bias=False)


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


@torch.inference_mode()
def test_states_are_handed_out_and_nothing_changes(models: tuple[Any, Any]) -> None:
    plain, ours = models[0], in_our_code(models[0])
    runner, lengths = read(ours), [len(prompt) for prompt in PROMPTS]

    def score(which: Runner, **asked: Any) -> Any:
        which.lengths = list(lengths)
        return which.forward(NEXT, keep=2, **asked)

    alone = score(runner).logits
    among = score(runner, output_hidden_states=True)
    expected = score(read(plain), output_hidden_states=True)
    assert torch.equal(among.logits, alone)
    embedded = ours.get_input_embeddings()(NEXT)
    assert torch.equal(score(runner, inputs_embeds=embedded).logits, alone)
    assert len(among.hidden_states) == len(expected.hidden_states) == 5
    for found, wanted in zip(among.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    # Whoever trains a head or looks into the model has transformers put its hooks into it.
    ours(input_ids=NEXT, use_cache=False, output_hidden_states=True)
    assert any(hooks for layer in ours.model.layers for hooks in hooks_of(layer))
    assert torch.equal(score(runner).logits, alone)
