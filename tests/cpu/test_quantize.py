"""Quantised models: a row's numbers are its own, and so speculation changes no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from outpace import LLM, SamplingParams, building
from outpace.engine.capture import EagerRunner
from outpace.errors import ConfigError, UnsupportedModel
from outpace.targets.cpu.native import native
from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.native_layers.linear import NativeLinear, native_int8
from outpace.targets.cpu.weights import quantize as quantising
from outpace.targets.cpu.weights.blocks import in_blocks, to_four_bits
from outpace.targets.cpu.weights.layers import linear_layers
from outpace.targets.cpu.weights.quantize import (
    Int8Linear,
    int8_levels,
    native_int8_blocks,
    quantize,
)
from outpace.targets.hf.fixed import FixedShapeConfig
from outpace.targets.hf.loading.load import load, load_drafter
from outpace.targets.hf.weights import pass_bytes, weight_bytes
from representatives import representatives

LEVELS = [levels for levels in (127, 63) if levels <= int8_levels()]
"""Those that this processor multiplies exactly."""

SHAPES = [(64, 32), (33, 48), (100, 7), (512, 1024)]


def _llama(seed: int, layers: int = 3, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a drafter that is a little off it."""
    folder = tmp_path_factory.mktemp("pair")
    target = _llama(0)
    target.save_pretrained(folder / "target")
    with torch.no_grad():
        for parameter in target.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    target.save_pretrained(folder / "drafter")
    return str(folder / "target"), str(folder / "drafter")


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(
    shape: tuple[int, int], bias: bool, levels: int
) -> None:
    layer = Int8Linear(nn.Linear(shape[1], shape[0], bias=bias), levels)
    x = torch.randn(16, shape[1]) * torch.logspace(-3, 3, 16)[:, None]
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in range(1, 17):
        assert torch.equal(layer(x[:rows]), alone[:rows])
        assert torch.equal(layer(x[-rows:].flip(0)), alone[-rows:].flip(0))
    assert torch.equal(layer(x.view(4, 4, -1)).view(16, -1), alone)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_only_the_weights_are_rounded(shape: tuple[int, int], levels: int) -> None:
    plain = nn.Linear(shape[1], shape[0])
    weight = plain.weight.double()
    step = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / step).round() * step
    x = torch.randn(9, shape[1])
    exact = x.double() @ rounded.t() + plain.bias.double()
    # Half a step of the finer half in each activation, and float32's own rounding.
    finest = x.double().abs().amax(1, keepdim=True) / levels / (2 * levels)
    most = finest / 2 * rounded.abs().sum(1) + 1e-5
    assert bool(((Int8Linear(plain, levels)(x) - exact).abs() <= most).all())
    assert bool(((exact - plain(x)).abs() > most).any())  # the bound is finer than the weights' own


@torch.inference_mode()
def test_a_row_of_zeros_gives_the_bias() -> None:
    layer = Int8Linear(nn.Linear(8, 4), LEVELS[0])
    assert torch.equal(layer(torch.zeros(2, 8)), layer.bias.expand(2, 4))


def test_the_processor_is_asked_for_exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    assert int8_levels() in (127, 63)
    product = quantising._product

    def saturating(x: Any, middle: int, packed: Any, scale: Any, zero: Any) -> Any:
        return product(x, middle, packed, scale, zero) - int(middle == 128)

    monkeypatch.setattr(quantising, "_product", saturating)
    assert int8_levels() == 63


@torch.inference_mode()
def test_gpt2_layers_are_quantised_as_they_are_laid_out() -> None:
    layer = Conv1D(24, 16)
    x = torch.randn(3, 16)
    torch.testing.assert_close(Int8Linear(layer, LEVELS[0])(x), layer(x), rtol=0, atol=5e-3)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, **ends))
    count = len(linear_layers(model))
    quantize(model, "int8")
    kinds = (Int8Linear, NativeLinear)
    assert sum(isinstance(module, kinds) for module in model.modules()) == count == 9
    assert type(model.transformer.wte) is nn.Embedding


@pytest.mark.skipif(native() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("drafted", ["int4", "int8", None])
def test_speculation_leaves_a_text_in_4_bits_alone(
    pair: tuple[str, str], drafted: str | None
) -> None:
    target, drafter = pair
    params = SamplingParams(temperature=0, max_tokens=40)
    prompts = [[1, 2, 3], [7], [50, 60, 70, 80, 90] * 4]
    texts = []
    config = {"model": drafter, "quantization": drafted, "num_speculative_tokens": 4}
    for method in (None, config, {"method": "ngram", "num_speculative_tokens": 3}):
        llm = LLM(target, quantization="int4", speculative_config=method)  # type: ignore[arg-type]
        texts.append([out.token_ids for out in llm.generate(prompts, params)])
        texts.append([llm.generate(prompt, params)[0].token_ids for prompt in prompts])
    assert all(text == texts[0] for text in texts)


@torch.inference_mode()
def test_four_bits_are_finer_than_plain_rounding() -> None:
    torch.manual_seed(0)
    for weight in (torch.randn(40, 96), torch.zeros(3, 64), torch.rand(5, 50) + 3):
        blocks = to_four_bits(weight)
        filled = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32))
        ours = (blocks.dense() - filled).square().mean()
        plain = (in_blocks(filled, "Q4_1").dense() - filled).square().mean()
        assert ours <= plain
        ranges = filled.view(len(weight), -1, 32)
        width = ranges.amax(-1, keepdim=True) - ranges.amin(-1, keepdim=True)
        assert bool(
            ((blocks.dense() - filled).view(ranges.shape).abs() <= 0.2 * width + 2e-3).all()
        )


@pytest.mark.skipif(native() is None, reason="needs a C++ compiler")
def test_four_bits_are_for_models_that_our_own_code_computes(tmp_path: Path) -> None:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, **ends))
    gpt2.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="Use 'int8'"):
        load(tmp_path, quantization="int4")


@pytest.mark.skipif(native() is None, reason="needs a C++ compiler")
def test_weights_beyond_the_scales_of_four_bits_are_refused(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 70_000
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"a weight of 70000, and .* use 'int8'"):
        load(tmp_path, quantization="int4")


def test_four_bits_without_a_compiler_are_refused(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantising, "native", lambda: None)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        load(pair[0], quantization="int4")


@pytest.mark.parametrize(
    ("drafted", "compiler"),
    representatives(
        [("int8", True), (None, True), ("int8", False), (None, False)],
        [("int8", True), (None, False)],
    ),
)
def test_speculation_leaves_a_quantised_text_alone(
    pair: tuple[str, str], drafted: str | None, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiler:
        monkeypatch.setattr(quantising, "native", lambda: None)
    target, drafter = pair
    config = {"model": drafter, "quantization": drafted, "num_speculative_tokens": 4}
    llm = LLM(target, quantization="int8", speculative_config=config)
    prompts = [[1, 2, 3], [7], [50, 60, 70, 80, 90]]
    texts = {
        speculative: [
            out.token_ids
            for out in llm.generate(
                prompts, SamplingParams(temperature=0, max_tokens=40, speculative=speculative)
            )
        ]
        for speculative in ("off", 4)
    }
    assert texts["off"] == texts[4]
    rounds = llm.generate(prompts[0], SamplingParams(temperature=0, max_tokens=40))[0].metrics
    assert 0 < rounds.num_accepted_tokens < rounds.num_draft_tokens
    plain = LLM(target, quantization="int8").generate(
        prompts, SamplingParams(temperature=0, max_tokens=40)
    )
    assert [out.token_ids for out in plain] == texts["off"]


@pytest.mark.skipif(native() is None, reason="needs a C++ compiler")
def test_eight_bits_are_in_blocks_where_our_own_code_computes_a_model(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, **ends))
    gpt2.save_pretrained(tmp_path)
    for folder, kind in ((pair[0], NativeBlockLinear), (str(tmp_path), NativeLinear)):
        model = load(folder, quantization="int8").model
        kinds = {type(module) for module in model.modules()}
        assert {NativeBlockLinear, NativeLinear} & kinds == {kind}


@pytest.mark.skipif(native() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("largest", "kind"), [(8e6, NativeBlockLinear), (9e6, NativeLinear)], ids=["within", "beyond"]
)
@torch.inference_mode()
def test_weights_beyond_the_scales_of_blocks_have_wider_scales(largest: float, kind: type) -> None:
    library = native()
    assert library is not None
    plain = nn.Linear(40, 24)
    plain.weight[3, 5] = largest
    layer = native_int8_blocks(library, plain)
    assert type(layer) is kind
    x = torch.randn(3, 40)
    assert bool(((layer(x) - plain(x)).abs() <= 0.02 * plain(x).abs() + 2).all())


def test_a_quantised_model_is_another_model(pair: tuple[str, str]) -> None:
    ids = torch.arange(20)[None]
    logits = [
        load(pair[0], quantization=kind).model(input_ids=ids).logits for kind in (None, "int8")
    ]
    off = (logits[0] - logits[1]).std() / logits[0].std()
    assert 1e-4 < off < 0.1


def test_memory_counts_integers_as_bytes(pair: tuple[str, str]) -> None:
    config = {"model": pair[1], "quantization": "int8"}
    llm = LLM(pair[0], quantization="int8", speculative_config=config)
    model = _llama(0)
    linear = [getattr(parent, name) for parent, name in linear_layers(model)]
    integers = sum(layer.weight.numel() for layer in linear)
    channels = sum(layer.out_features for layer in linear)
    own = {id(layer.weight) for layer in linear if layer is not model.lm_head}
    floats = sum(p.numel() for p in model.parameters() if id(p) not in own)
    # Outputs come in panels of 16, in whole lines of 64 bytes, and blocks of 32 have a scale of 2
    # bytes; where the products are oneDNN's, each output has a scale and a zero point.
    blocks = sum(
        -(-layer.out_features // 16) * -(-layer.in_features * 34 // 2 // 64) * 64
        for layer in linear
    )
    expected = 4 * floats + (integers + 8 * channels if native() is None else blocks)
    assert llm.memory["target_weights"] == llm.target.nbytes == expected
    assert llm.memory["drafter_weights"] == expected
    assert expected < weight_bytes(model) / 2.5


def test_torchao_tensors_count_what_they_hold() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert 64 * 32 < weight_bytes(model) < 64 * 32 * 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"quantization": "int7"}, "did you mean 'int8'"),
        ({"quantization": "int4", "dtype": "float64"}, "not in float64: use dtype 'float32'"),
        ({"quantization": "int8", "dtype": "float64"}, "not in float64: use dtype 'float32'"),
        ({"quantization": "int8", "dtype": "bfloat16"}, "not in bfloat16"),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    pair: tuple[str, str], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        LLM(pair[0], **options)


def test_a_model_handed_over_is_refused() -> None:
    model = _llama(0)
    with pytest.raises(ConfigError, match="give its path"):
        LLM(model, quantization="int8")
    assert type(model.lm_head) is nn.Linear


def test_a_processor_without_the_products_is_refused(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantising, "int8_levels", lambda: 0)
    monkeypatch.setattr(quantising, "native", lambda: None)
    with pytest.raises(ConfigError, match="this processor"):
        load(pair[0], quantization="int8")


def test_a_model_whose_weights_are_elsewhere_is_refused() -> None:
    experts = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
    )
    for model in (nn.Sequential(nn.Embedding(3, 3)), MixtralForCausalLM(experts)):
        with pytest.raises(UnsupportedModel, match="outside plain linear layers"):
            quantize(model, "int8")


@torch.inference_mode()
def test_our_own_products_round_nothing_but_the_weights() -> None:
    library = native()
    if library is None:
        pytest.skip("no C++ compiler here")
    for shape in SHAPES:
        plain = nn.Linear(shape[1], shape[0])
        layer = native_int8(library, plain)
        assert layer.scale is not None
        rounded = layer.weight.double() * layer.scale.double()[:, None]
        assert bool(((rounded - plain.weight).abs() <= 0.51 * layer.scale[:, None]).all())
        x = torch.randn(40, shape[1])
        exact = x.double() @ rounded.t() + plain.bias.double()
        for rows in (1, 5, 40):
            torch.testing.assert_close(layer(x[:rows]), exact[:rows].float(), rtol=1e-5, atol=2e-5)
        assert pass_bytes(layer) == pass_bytes(Int8Linear(plain, LEVELS[0]))


@torch.inference_mode()
def test_no_rows_give_no_rows() -> None:
    assert Int8Linear(nn.Linear(64, 32), LEVELS[0])(torch.zeros(0, 64)).shape == (0, 32)


def test_a_gpu_without_torchao_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(ConfigError, match="pip install 'outpace\\[quant\\]'"):
        quantising.check("int4", torch.device("cuda"), "auto")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_model_runs_on_a_gpu(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torchao")
    config = _llama(0).config
    config.hidden_size, config.intermediate_size = 256, 512  # int4 packs groups of 128
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    llm = LLM(
        tmp_path,
        quantization=kind,  # type: ignore[arg-type]
        device="cuda",
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    )
    assert llm.memory["target_weights"] < weight_bytes(LlamaForCausalLM(config).bfloat16())
    for speculative in ("off", 4):
        params = SamplingParams(temperature=0, max_tokens=16, speculative=speculative)
        assert len(llm.generate([[1, 2, 3]], params)[0].token_ids) == 16


@pytest.fixture
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantising, "WORTH", 1 << 10)


@pytest.mark.skipif(native() is None, reason="needs a C++ compiler")
@pytest.mark.usefixtures("worth_it")
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "int8"),
        ({"quantization": None}, None),
        ({"dtype": "float32"}, None),  # asked for
        ({"dtype": "float64"}, None),
        ({"quantization": "int8", "dtype": "float32"}, "int8"),
    ],
)
@pytest.mark.parametrize("method", ["draft_model", "draft_tree"])
def test_a_drafter_has_8_bits_unless_told_otherwise(
    pair: tuple[str, str], method: str, config: dict[str, Any], expected: str | None
) -> None:
    llm = LLM(pair[0], speculative_config={"method": method, "model": pair[1], **config})
    drafter: Any = llm.engine.drafter
    assert drafter.loaded.quantization == expected
    kinds = {type(module) for module in drafter.runner.model.modules()}
    assert (NativeBlockLinear in kinds) == (expected == "int8")
    assert llm.target.quantization is None


@pytest.mark.usefixtures("worth_it")
def test_models_that_are_compiled_have_no_blocks(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(model: nn.Module) -> FixedShapeConfig:
        return FixedShapeConfig(model, EagerRunner(), pads=False)

    monkeypatch.setattr(building, "capture_for", capture)
    params = SamplingParams(temperature=0, max_tokens=20)
    config = {"model": pair[1], "num_speculative_tokens": 4}
    llm = LLM(pair[0], compile=True, quantization="int8", speculative_config=config)
    for runner in (llm.engine.target.runner, llm.engine.drafter.runner):  # type: ignore[attr-defined]
        assert runner.fixed is not None
        assert NativeBlockLinear not in {type(module) for module in runner.model.modules()}
    texts = [llm.generate([1, 2, 3], replace(params, speculative=each)) for each in ("off", 4)]
    assert texts[0][0].token_ids == texts[1][0].token_ids


@pytest.mark.usefixtures("worth_it")
def test_a_drafter_in_8_bits_leaves_the_text_alone(pair: tuple[str, str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    prompts = [[1, 2, 3], [7], [50, 60, 70, 80, 90]]
    plain = [out.token_ids for out in LLM(pair[0]).generate(prompts, params)]
    config = {"model": pair[1], "num_speculative_tokens": 4}
    found = LLM(pair[0], speculative_config=config).generate(prompts, params)
    assert [out.token_ids for out in found] == plain
    assert sum(out.metrics.num_accepted_tokens for out in found) > 0


@pytest.mark.usefixtures("worth_it")
def test_what_is_not_worth_it_or_not_ours_stays_as_it_is(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handed = load(pair[1], quantization=None)
    assert load_drafter(handed, handed).quantization is None
    assert load_drafter(pair[1], handed, cpu_kernels="off").quantization is None
    mixture = MixtralConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    assert not quantising.pays(MixtralForCausalLM(mixture))
    assert not quantising.pays(_llama(0).double())
    monkeypatch.setattr(quantising, "WORTH", 1 << 18)
    assert not quantising.pays(_llama(0))
    monkeypatch.setattr(quantising, "WORTH", 1 << 10)
    monkeypatch.setattr(quantising, "native", lambda: None)
    assert not quantising.pays(_llama(0))
