"""Experts in blocks: the numbers of dequantised weights, and the same bits in any company."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cpu.test_blocks import drafts_change_no_word, same_bits_everywhere
from outpace.targets.cpu.native import Native, native
from outpace.targets.cpu.native_layers.blocks import dequantize_blocks, use_block_kernels
from outpace.targets.cpu.native_layers.experts import ExpertGroups, Scoring, mixture_of
from outpace.targets.cpu.native_layers.model import NativeModel
from outpace.targets.cpu.weights.blocks import Blocks
from outpace.targets.cpu.weights.experts import BlockExperts
from outpace.targets.cpu.weights.latents import BlockLatents
from outpace.targets.describe import describe
from outpace.targets.hf.gguf.load import read_dequantized
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.weights import pass_bytes, weight_bytes
from targets.gguf.files import tiny, write

pytestmark = pytest.mark.skipif(native() is None, reason="no C++ compiler here")

MANY: dict[str, Any] = {"num_experts": 61, "num_experts_per_tok": 5}
"""A number of experts of which the last ones do not fill a vector."""
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3moe": MANY,
    "qwen2moe": {},
    "mixtral": {},
    "olmoe": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "gpt-oss": {},
    "glm4moe": {},
    "deepseek2": {},
    "deepseek2-lite": {},
    "deepseek2-v2": {},
}
KINDS = {
    "qwen3moe": "Q4_0",
    "deepseek2-lite": "Q5_1",
    "olmoe": "Q5_1",
    "gpt-oss": "MXFP4",
    "mixtral": "IQ4_NL",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {
        arch: write(folder / f"{arch}.gguf", arch, tiny(arch, **more), KINDS.get(arch, "Q8_0"))
        for arch, more in MIXTURES.items()
    }


@cache
def played(path: Path) -> Any:
    """The model of a file, which our own code computes. Tests that change it have a copy."""
    with torch.inference_mode(False):
        model = load(path).model
    assert isinstance(model.forward, NativeModel)
    return model


def experts_of(model: Any) -> list[BlockExperts]:
    return [module for module in model.modules() if isinstance(module, BlockExperts)]


def mixtures_in(model: Any) -> list[Any]:
    layers = [layer.forward.description for layer in model.model.layers]
    return [layer.mixture for layer in layers if layer.mixture is not None]


def read(model: Any, tokens: Tensor) -> Tensor:
    """Returns the logits of rows of tokens, in one pass."""
    runner = Runner(model, rows=len(tokens), max_length=max(64, tokens.shape[1]))
    runner.admit(len(tokens))
    logits: Tensor = runner.forward(tokens, keep=tokens.shape[1]).logits
    return logits


@pytest.mark.parametrize("arch", MIXTURES)
@torch.inference_mode()
def test_models_give_the_numbers_of_dequantized_weights(arch: str, files: dict[str, Path]) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 200, (2, 15))
    found = read(played(files[arch]), tokens)
    expected = read(load(files[arch], **OFF).model, tokens)
    off = (found - expected).square().mean(-1).sqrt() / expected.std(-1)
    assert float((off < 0.05).float().mean()) >= 0.8, "a choice may be another one now and then"
    assert 1e-4 < off.median() < 0.03, "activations are rounded, and nothing else"


OFF: dict[str, Any] = {"cpu_kernels": "off"}


@pytest.mark.parametrize("arch", MIXTURES)
@torch.inference_mode()
def test_a_token_has_the_same_bits_alone_and_among_drafts(
    arch: str, files: dict[str, Path]
) -> None:
    same_bits_everywhere(played(files[arch]), 200)


@torch.inference_mode()
def test_more_tokens_than_meet_their_experts_at_once(files: dict[str, Path]) -> None:
    model, text = played(files["qwen3moe"]), torch.arange(1900)[None] * 7 % 200
    assert text.shape[1] * MANY["num_experts_per_tok"] > 2 * 4096
    whole = read(model, text)
    runner = Runner(model, rows=1, max_length=2048)
    runner.admit(1)
    parts = []
    for first in range(0, 1900, 190):
        runner.lengths = [first]
        parts.append(runner.forward(text[:, first : first + 190], keep=190).logits)
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen2moe", "deepseek2", "deepseek2-lite"])
@torch.inference_mode()
def test_bits_do_not_depend_on_the_number_of_threads(arch: str, files: dict[str, Path]) -> None:
    model, tokens = played(files[arch]), torch.randint(0, 200, (2, 40))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (threads, 1, 3):
            torch.set_num_threads(count)
            found.append(read(model, tokens))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("arch", MIXTURES)
def test_drafts_change_no_word(arch: str, files: dict[str, Path]) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 4}
    drafts_change_no_word(files[arch], config)


@torch.inference_mode()
def test_only_blocks_of_chosen_experts_are_read(tmp_path: Path) -> None:
    more = {**MANY, "num_hidden_layers": 1}
    path = write(tmp_path / "model.gguf", "qwen3moe", tiny("qwen3moe", **more), "Q4_0")
    model = played(path)
    token = torch.tensor([[5]])
    expected, spoilt = read(model, token), 0
    for layer in (experts := experts_of(model)[0]).children():
        if layer is experts.like:
            continue
        for part in layer.panels.view(MANY["num_experts"], -1):
            kept = part.clone()
            part.fill_(0xFF)  # scales that are no numbers
            spoilt += not torch.equal(read(model, token), expected)
            part.copy_(kept)
    assert spoilt == 3 * MANY["num_experts_per_tok"]
    assert torch.equal(read(model, token), expected)


def test_what_routers_compute_is_found_out(files: dict[str, Path]) -> None:
    found = {arch: mixtures_in(played(path))[0].routing for arch, path in files.items()}
    softmax = {arch for arch, each in found.items() if each.scoring is Scoring.SOFTMAX}
    assert softmax == set(MIXTURES) - {"glm4moe", "deepseek2"}
    plain = {"qwen2moe", "olmoe", "deepseek2-lite", "deepseek2-v2"}
    assert {arch for arch, each in found.items() if not each.norm_topk} == plain
    assert found["deepseek2"].groups == ExpertGroups(number=4, topk=2, best=2)
    assert found["deepseek2-v2"].groups == ExpertGroups(number=4, topk=2, best=1)
    assert found["glm4moe"].groups == ExpertGroups(number=4, topk=2, best=2)
    assert (found["glm4moe"].top_k, found["glm4moe"].scaling) == (3, 1.5)
    assert found["qwen3moe"].top_k == 5


@torch.inference_mode()
def test_a_router_of_another_kind_is_left_to_transformers(files: dict[str, Path]) -> None:
    model = copy.deepcopy(played(files["qwen3moe"]))
    mlp, lanes = model.model.layers[0].mlp, native().lanes
    assert mixture_of(mlp, lanes) is not None
    own = mlp.gate.forward
    for other in (
        lambda x: (None, 2 * own(x)[1], own(x)[2]),  # other weights
        lambda x: (None, own(x)[1], own(-x)[2]),  # other experts
        lambda x: own(x)[1:],
        lambda x, more: own(x),
    ):
        mlp.gate.forward = other
        assert mixture_of(mlp, lanes) is None


def test_memory_is_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dequantized: list[int] = []
    for owner, name in ((Blocks, "dense"), (Native, "dequantize_blocks")):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, own=own: dequantized.append(1) or own(*a))
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 16}
    path = write(tmp_path / "m.gguf", "qwen3moe", tiny("qwen3moe", **sizes), "Q4_0")
    dequantized.clear()
    model = played(path)
    assert weight_bytes(model) < 1.15 * path.stat().st_size
    assert not [p for p in model.parameters() if p.dim() == 3], "no expert is there as numbers"
    read(model, torch.tensor([[5, 6]]))
    assert not dequantized
    whole = sum(
        layer.packed_bytes for each in experts_of(model) for layer in list(each.children())[:3]
    )
    assert pass_bytes(model) == pytest.approx(
        weight_bytes_read(model) - whole * (1 - 2 / 16), rel=1e-6
    )


def weight_bytes_read(model: Any) -> int:
    """The bytes of all weights but those that are looked up."""
    return weight_bytes(model) - model.model.embed_tokens.packed_bytes


def test_it_says_what_computes_the_experts(files: dict[str, Path]) -> None:
    found = describe(load(files["gpt-oss"]))
    assert (found.kernels, found.native_layers, found.whole_model) == ("integer", 2, True)
    assert found.blocks == "MXFP4 100 %"


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "granitemoeshared", "deepseek2"])
@torch.inference_mode()
def test_experts_in_blocks_are_dequantized_as_transformers_holds_them(
    arch: str, files: dict[str, Path]
) -> None:
    expected = read_dequantized(str(files[arch]))
    for how in ({}, OFF):
        model = load(files[arch], **how).model
        held, wanted = model.state_dict(), expected.state_dict()
        assert {*held} - {"lm_head.weight"} == {*wanted} - {"lm_head.weight"}
        parts = ("experts", "kv_b_proj")
        for name in (each for each in held if any(part in each for part in parts)):
            assert torch.equal(held[name], wanted[name])
    plain = load(files[arch], **OFF).model
    tokens = torch.randint(0, 200, (1, 9))
    logits = plain(tokens).logits
    assert torch.allclose(logits, expected(tokens).logits, rtol=1e-3, atol=1e-3)
    dequantize_blocks(plain)
    assert not experts_of(plain)
    assert not [each for each in plain.modules() if isinstance(each, BlockLatents)]
    assert torch.allclose(plain(tokens).logits, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("arch", ["gpt-oss", "deepseek2"])
@torch.inference_mode()
def test_copies_and_pickles_compute_the_same(arch: str, files: dict[str, Path]) -> None:
    model, tokens = played(files[arch]), torch.randint(0, 200, (1, 9))
    expected = read(model, tokens)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(read(other, tokens), expected)


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "deepseek2"])
def test_transformers_code_computes_experts_with_the_same_products(
    arch: str, files: dict[str, Path]
) -> None:
    """Where somebody looks on, or asks for gradients."""
    model = load(files[arch], **OFF).model
    tokens = torch.randint(0, 200, (1, 9))
    with torch.no_grad():
        expected = model(tokens).logits
        assert use_block_kernels(model) > 0
        off = (model(tokens).logits - expected).square().mean(-1).sqrt() / expected.std(-1)
        assert off.median() < 0.03
        states = model.get_input_embeddings()(tokens).clone()
    model(inputs_embeds=states.requires_grad_()).logits.sum().backward()
    assert states.grad is not None
