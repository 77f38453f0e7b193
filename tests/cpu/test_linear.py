"""Faster linear layers: the same numbers, the same parameters, nobody's model after his back."""

from __future__ import annotations

import copy
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from outpace import LLM
from outpace.errors import ConfigError
from outpace.targets.cpu import kernels as choosing
from outpace.targets.cpu.kernels import MIN_ELEMENTS, Kernel, preferred, speed_up
from outpace.targets.cpu.library.processor import Processor, levels_below, this_processor
from outpace.targets.cpu.linear import PackedLinear, RowLinear, can_pack
from outpace.targets.cpu.native_layers.linear import NativeLinear
from outpace.targets.cpu.prebuilt import LEVELS
from outpace.targets.cpu.weights.layers import linear_layers, replace_modules
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.weights import pass_bytes, weight_bytes

ROWS = (1, 2, 3, 4, 6, 12, 13, 16, 64, 128, 129)


@pytest.fixture(params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    if request.param == "llama":
        config = LlamaConfig(
            vocab_size=101,  # no multiple of a block
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        return LlamaForCausalLM(config).eval()
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=101, n_embd=64, n_layer=2, n_head=4, **ends)
    ).eval()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 32), (31, 48), (33, 48), (100, 7)])
def test_same_product_for_every_number_of_rows(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(shape[1], shape[0], bias=bias)
    fast = RowLinear(plain.weight, plain.bias)
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        torch.testing.assert_close(fast(x), plain(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(fast(x[None]), plain(x[None]), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_model_keeps_its_numbers_and_its_parameters(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    ids = torch.randint(0, 100, (1, 20))
    before = {columns: model(ids[:, :columns]).logits for columns in (1, 5, 12, 20)}
    count = speed_up(model, "blocked", smallest=1)
    assert count == sum(isinstance(module, RowLinear) for module in model.modules()) > 8
    for columns, logits in before.items():
        torch.testing.assert_close(model(ids[:, :columns]).logits, logits, rtol=1e-4, atol=1e-5)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(model.get_parameter(name) is value for name, value in parameters.items())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_give_the_same_product_and_show_the_plain_weight(
    dtype: torch.dtype, bias: bool
) -> None:
    if not can_pack(dtype):
        pytest.skip("this processor has no such products")
    torch.manual_seed(0)
    plain = nn.Linear(48, 31, bias=bias).to(dtype)
    fast = PackedLinear(plain.weight, plain.bias)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {}
    with torch.inference_mode():
        for rows in ROWS:
            x = torch.randn(2, rows, 48, dtype=dtype)
            torch.testing.assert_close(fast(x), plain(x), **tolerance)
    assert torch.equal(fast.weight, plain.weight)
    assert fast.state_dict().keys() == plain.state_dict().keys()
    assert weight_bytes(fast) == weight_bytes(plain)


@torch.inference_mode()
def test_a_packed_model_keeps_its_numbers_and_its_state(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.randint(0, 100, (1, 20))
    before = {columns: model(ids[:, :columns]).logits for columns in (1, 5, 12, 20)}
    count = speed_up(model, "packed", smallest=1)
    assert count == sum(isinstance(module, PackedLinear) for module in model.modules()) > 8
    for columns, logits in before.items():
        torch.testing.assert_close(model(ids[:, :columns]).logits, logits, rtol=1e-4, atol=1e-5)
    kept = model.state_dict()
    assert kept.keys() == state.keys()
    assert all(torch.equal(kept[name], value) for name, value in state.items())


ZEN5 = Processor("AuthenticAMD", "EPYC", frozenset({"avx2", "avx512f", "avx512_bf16"}))
ZEN3 = Processor("AuthenticAMD", "EPYC", frozenset({"avx2"}))
XEON = Processor("GenuineIntel", "Xeon", frozenset({"avx2", "avx512f", "amx_bf16", "amx_tile"}))


@pytest.mark.parametrize(
    ("dtype", "processor", "order"),
    [
        (torch.float32, ZEN5, ("native", "packed", "blocked")),
        (torch.float32, XEON, ("native", "blocked", "packed")),
        (torch.bfloat16, ZEN5, ("packed", "native")),
        (torch.bfloat16, XEON, ("packed", "native")),
        (torch.bfloat16, ZEN3, ("native", "packed", "blocked")),
    ],
)
def test_the_processor_and_the_dtype_decide(
    dtype: torch.dtype, processor: Processor, order: tuple[str, ...]
) -> None:
    assert preferred(dtype, processor) == order


def test_the_processor_says_what_it_is() -> None:
    found = this_processor()
    assert found == this_processor()
    assert found.identity == this_processor().identity
    assert found.identity != ZEN3.identity
    assert [each.instructions for each in (ZEN5, ZEN3, XEON)] == ["AVX-512", "AVX2", "AMX"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_processor_can_be_lowered_to_each_level(level: str) -> None:
    everything = frozenset().union(*(needed for _, needed in LEVELS.values()))
    strong = Processor("GenuineIntel", "some Xeon", everything | {"sse2", "avx512_bf16"})
    lowered = strong.lowered(level)
    assert lowered.flags == LEVELS[level][1] | {"sse2"}
    assert lowered.identity != strong.identity
    assert level in lowered.instructions
    assert not lowered.multiplies_bfloat16
    assert levels_below(strong) == list(LEVELS)[1:]


def test_a_processor_is_only_lowered() -> None:
    with pytest.raises(ConfigError, match=r"lacks .*avx512bw.* only lowers"):
        ZEN3.lowered("x86-64-v4")
    with pytest.raises(ConfigError, match=r"no level.*x86-64-v3"):
        ZEN3.lowered("avx2")
    assert levels_below(ZEN3) == []


def _large(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))).to(dtype)


@pytest.mark.parametrize("order", [("packed", "native"), ("blocked", "packed"), ("off",)])
def test_no_clock_chooses_a_kernel(order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def clock() -> float:
        raise AssertionError("a kernel was timed")

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr("outpace.targets.cpu.race.perf_counter", clock)
    monkeypatch.setattr(choosing, "preferred", lambda dtype, processor: order)
    monkeypatch.setitem(MIN_ELEMENTS, "blocked", 1)
    model = _large()
    kind = {"packed": PackedLinear, "blocked": RowLinear, "off": nn.Linear}[order[0]]
    assert speed_up(model) == (0 if order[0] == "off" else 3)
    assert {type(layer) for layer in model} == {kind}


def test_a_race_is_run_where_it_is_asked_for_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter([value for _ in range(6) for value in (0, 9, 10, 11)])  # the second one wins
    monkeypatch.setattr("outpace.targets.cpu.race.perf_counter", lambda: next(clock))
    found = choosing.available()
    known = {name: replace(found[name], smallest=1) for name in ("packed", "blocked")}
    monkeypatch.setattr(choosing, "available", lambda: known)
    monkeypatch.setattr(choosing, "preferred", lambda dtype, processor: ("packed", "blocked"))
    model = _large()
    weights = [layer.weight for layer in model]
    with caplog.at_level("INFO", logger="outpace"):
        assert speed_up(model, "tune") == 3
    assert {type(layer) for layer in model} == {RowLinear}
    assert [layer.weight for layer in model] == weights, "the race leaves them where they are"
    assert "'blocked' won the race" in caplog.text


def test_nothing_is_compiled_for_models_that_no_kernel_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled() -> dict[str, Kernel]:
        raise AssertionError("kernels were made")

    monkeypatch.setattr(choosing, "available", compiled)
    assert speed_up(_large(torch.float64)) == speed_up(_large().to("meta")) == 0


def test_layers_that_were_replaced_are_released() -> None:
    model = _large()
    alive = []

    def make(layer: Any) -> nn.Module:
        gone.append(weakref.ref(layer))
        alive.append(sum(reference() is not None for reference in gone))
        return nn.Identity()

    gone: list[weakref.ref[nn.Module]] = []
    assert replace_modules(linear_layers(model), make) == 3
    assert alive == [1, 1, 1]


def test_other_dtypes_and_subclasses_stay(model: nn.Module) -> None:
    class Own(nn.Linear):
        pass

    assert speed_up(model.double(), smallest=1) == 0
    for kernels in ("auto", "native", "packed", "blocked"):
        assert speed_up(nn.Sequential(Own(32, 32)), kernels, smallest=1) == 0
        assert speed_up(nn.Sequential(nn.Linear(32, 32)), kernels) == 0, "too small to pay"
    assert speed_up(nn.Sequential(nn.Linear(32, 32)), "off", smallest=1) == 0


def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown cpu_kernels 'packd' \(did you mean 'packed'\?\)"
    ):
        speed_up(nn.Sequential(), "packd")  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", ["native", "packed", "blocked"])
def test_a_kernel_that_was_asked_for_is_used_or_refused(
    kernels: Any, model: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"cpu_kernels '{kernels}' is for .* leave it at 'auto'"):
        speed_up(model.double(), kernels)
    with pytest.raises(ConfigError, match="a model that you loaded stays as it is"):
        load(model, cpu_kernels=kernels)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="and quantization exclude each other"):
        load(tmp_path, cpu_kernels=kernels, quantization="int8")
    with pytest.raises(ConfigError, match="unknown cpu_kernels"):
        load(tmp_path, cpu_kernels="pakced", quantization="int8")  # type: ignore[arg-type]


def test_a_layer_in_two_places_stays_one() -> None:
    layer = nn.Linear(256, 256)
    both = nn.Sequential(layer, nn.Sequential(layer))
    assert speed_up(both, "packed") == 1
    assert both[0] is both[1][0] is not layer
    assert weight_bytes(both) == weight_bytes(nn.Sequential(layer))


def test_a_model_handed_over_stays_as_it_is(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=MIN_ELEMENTS["blocked"] // 16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config)
    load(model)
    assert type(model.lm_head) is nn.Linear
    model.save_pretrained(tmp_path)
    assert type(load(tmp_path, cpu_kernels="blocked").model.lm_head) is RowLinear
    assert type(load(tmp_path, cpu_kernels="packed").model.lm_head) is PackedLinear
    assert type(load(tmp_path).model.lm_head) in (NativeLinear, RowLinear, PackedLinear)
    assert type(load(tmp_path, cpu_kernels="off").model.lm_head) is nn.Linear


def test_a_drafter_gets_the_kernels_that_were_asked_for(tmp_path: Path) -> None:
    shape = LlamaConfig(
        vocab_size=2048,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    LlamaForCausalLM(shape).save_pretrained(tmp_path)
    config = {"method": "draft_model", "model": str(tmp_path)}
    for kernels, kind in {"packed": PackedLinear, "off": nn.Linear}.items():
        llm = LLM(tmp_path, speculative_config=config, cpu_kernels=kernels)
        assert type(llm.target.model.lm_head) is kind
        assert type(llm.engine.drafter.runner.model.lm_head) is kind


@torch.inference_mode()
def test_what_a_pass_reads_does_not_depend_on_the_kernels(model: nn.Module) -> None:
    read = pass_bytes(model)
    assert 0 < read <= weight_bytes(model)
    narrow = copy.deepcopy(model)
    for parameter in narrow.parameters():
        parameter.copy_(parameter.bfloat16())
    speed_up(model, "packed", smallest=1)
    speed_up(narrow, "native", smallest=1)
    assert pass_bytes(model) == pass_bytes(narrow) == read
    assert weight_bytes(narrow) < weight_bytes(model)
