"""LoRA adapters: merged as peft computes them, and refused where they cannot be."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from outpace import LLM
from outpace.errors import ConfigError, ModelLoadError, OutpaceError, UnsupportedModel
from outpace.targets.hf.loading import load as loading
from outpace.targets.hf.loading.load import load, load_drafter, load_plain
from outpace.targets.hf.loading.lora import read_adapter
from targets.families import build
from targets.gguf.files import tiny, write

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
LLAMA = ["q_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("base") / "model"
    build("llama").save_pretrained(place)
    return place


def layers_of(model: nn.Module, ends: list[str]) -> dict[str, Any]:
    return {
        name: module for name, module in model.named_modules() if name.rpartition(".")[2] in ends
    }


def adapter(
    place: Path,
    model: nn.Module,
    ends: list[str],
    rank: int = 3,
    more: Mapping[str, Tensor] | None = None,
    **about: Any,
) -> Path:
    """Writes an adapter of random numbers with peft's names."""
    torch.manual_seed(3)
    weights: dict[str, Tensor] = {}
    for name, layer in layers_of(model, ends).items():
        own = (about.get("rank_pattern") or {}).get(name.rpartition(".")[2], rank)
        outputs, inputs = layer.weight.shape
        stem = f"base_model.model.{name}"
        if isinstance(layer, nn.Embedding):
            weights[f"{stem}.lora_embedding_A"] = torch.randn(own, outputs) * 0.1
            weights[f"{stem}.lora_embedding_B"] = torch.randn(inputs, own) * 0.1
            continue
        if isinstance(layer, Conv1D):
            outputs, inputs = inputs, outputs
        weights[f"{stem}.lora_A.weight"] = torch.randn(own, inputs) * 0.1
        weights[f"{stem}.lora_B.weight"] = torch.randn(outputs, own) * 0.1
        if about.get("use_dora"):
            weights[f"{stem}.lora_magnitude_vector"] = torch.rand(outputs) + 0.5
        if about.get("lora_bias"):
            weights[f"{stem}.lora_B.bias"] = torch.randn(outputs) * 0.1
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 5,
        "base_model_name_or_path": "some/base", "target_modules": ends, "inference_mode": True,
        **about,
    }  # fmt: skip
    place.mkdir(exist_ok=True)
    (place / "adapter_config.json").write_text(json.dumps(config))
    save_file({**weights, **(more or {})}, place / "adapter_model.safetensors")
    return place


# -- the same numbers as peft's ----------------------------------------------------------------

OF_PEFT = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
"""What peft warns of: attributes of transformers that it reads, and tied weights."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {"ends": LLAMA},
    "rslora": {"ends": LLAMA, "use_rslora": True},
    "patterns": {
        "ends": LLAMA,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 9, "down_proj": 1},
    },
    "dora": {"ends": LLAMA, "use_dora": True},
    "lora_bias": {"ends": ["q_proj"], "lora_bias": True},
    "embedding": {"ends": ["embed_tokens", "k_proj"]},
    "head": {"ends": ["lm_head"]},
    "saved": {"ends": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@OF_PEFT
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_answer_is_that_of_peft(case: str, tied: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    options = {"attention_bias": True} if case == "lora_bias" else {}
    model = build("llama", tie_word_embeddings=tied, **options)
    model.save_pretrained(tmp_path / "model")
    about = dict(CASES[case])
    more = {}
    if "modules_to_save" in about:
        more = {"base_model.model.lm_head.weight": torch.randn_like(model.lm_head.weight)}
    place = adapter(tmp_path / "adapter", model, about.pop("ends"), more=more, **about)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    expected = peft.PeftModel.from_pretrained(base, place).eval()
    loaded = load(tmp_path / "model", dtype="float64", lora=place)
    with torch.no_grad():
        ours, theirs = loaded.model(IDS).logits, expected(IDS).logits
    assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10)
    plain = load(tmp_path / "model", dtype="float64").model(IDS).logits
    assert not torch.allclose(ours, plain, atol=1e-3)


@OF_PEFT
def test_peft_saves_what_is_read_here(tmp_path: Path) -> None:
    """Written by peft itself, with biases and a module of its own."""
    peft = pytest.importorskip("peft")
    model = build("qwen2")
    model.save_pretrained(tmp_path / "model")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], bias="all", init_lora_weights="gaussian",
        modules_to_save=["embed_tokens"],
    )  # fmt: skip
    adapted = peft.get_peft_model(model.double(), config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name or "bias" in name or "modules_to_save" in name:
                weight.add_(torch.randn_like(weight) * 0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = load(tmp_path / "model", dtype="float64", lora=tmp_path / "adapter")
    with torch.no_grad():
        assert torch.allclose(
            loaded.model(IDS).logits, adapted.eval()(IDS).logits, rtol=1e-10, atol=1e-10
        )


# -- against the formula -----------------------------------------------------------------------


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_weight_becomes_w_plus_s_b_a(
    folder: Path, tmp_path: Path, dtype: torch.dtype, rslora: bool
) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    place = adapter(tmp_path / "adapter", base, LLAMA, use_rslora=rslora)
    loaded: Any = load_plain(
        str(folder), dtype=dtype, device="cpu", trust_remote_code=False, lora=place,
        progress=lambda *_: None,
    ).model  # fmt: skip
    weights = load_file(place / "adapter_model.safetensors")
    scale = 5 / (math.sqrt(3) if rslora else 3)
    for name, layer in layers_of(base, [*LLAMA, "k_proj", "lm_head"]).items():
        expected = layer.weight.double()
        stem = f"base_model.model.{name}"
        if f"{stem}.lora_A.weight" in weights:
            down, up = (weights[f"{stem}.lora_{end}.weight"].double() for end in "AB")
            expected = expected + scale * up @ down
        found = loaded.get_submodule(name).weight
        assert found.dtype == dtype
        assert torch.allclose(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_columns_and_rows_change_places_in_gpt2(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "model")
    place = adapter(tmp_path / "adapter", model, ["c_attn"], fan_in_fan_out=True)
    weights = load_file(place / "adapter_model.safetensors")
    for name, layer in layers_of(model, ["c_attn"]).items():
        down, up = (weights[f"base_model.model.{name}.lora_{end}.weight"] for end in "AB")
        layer.weight.data += 5 / 3 * (up @ down).t()
    loaded = load(tmp_path / "model", dtype="float64", lora=place)
    with torch.no_grad():
        expected = model.double()(IDS).logits
    assert torch.allclose(loaded.model(IDS).logits, expected, atol=1e-5)


def test_a_tied_head_keeps_its_own_weights(tmp_path: Path) -> None:
    """An adapter of the embedding alone changes what is read, not what is written."""
    model = build("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "model")
    place = adapter(tmp_path / "adapter", model, ["embed_tokens"])
    loaded: Any = load(tmp_path / "model", dtype="float64", lora=place, cpu_kernels="off").model
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.double())
    assert not torch.equal(loaded.model.embed_tokens.weight, loaded.lm_head.weight)
    assert not loaded.config.tie_word_embeddings


# -- in use ------------------------------------------------------------------------------------


def test_texts_are_those_of_the_merged_model(folder: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder)
    place = adapter(tmp_path / "adapter", base, LLAMA)
    load_plain(
        str(folder), dtype="float32", device="cpu", trust_remote_code=False, lora=place,
        progress=lambda *_: None,
    ).model.save_pretrained(tmp_path / "merged")  # type: ignore[operator]  # fmt: skip
    greedy = {"temperature": 0, "max_tokens": 24}

    def text(model: Path, config: dict[str, Any], **options: Any) -> list[int]:
        llm = LLM(model, dtype="float64", speculative_config=config, **options)
        assert (llm.describe().lora is None) == (not options)
        return llm.generate([[5, 6, 7]], greedy)[0].token_ids  # type: ignore[no-any-return]

    none = {"method": "none"}
    drafted = {"model": str(folder), "lora": str(place), "num_speculative_tokens": 3}
    expected = text(tmp_path / "merged", none)
    assert text(folder, none, lora=place) == expected
    assert text(folder, drafted, lora=place) == expected
    assert text(folder, none) != expected
    llm = LLM(folder, dtype="float64", speculative_config=drafted, lora=place)
    made = llm.generate([[5, 6, 7]], greedy)[0].metrics
    assert made.num_accepted_tokens == made.num_draft_tokens, "the drafter is adapted too"
    assert f"with the adapter {place}" in str(llm.describe())


def test_of_a_gguf_file_the_changed_weights_are_dequantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("llama")
    path = write(tmp_path / "model.gguf", "llama", model, "Q8_0")
    place = adapter(tmp_path / "adapter", model, ["q_proj"])
    expected: Any = load(path, dtype="float64", cpu_kernels="off").model
    weights = load_file(place / "adapter_model.safetensors")
    for name in layers_of(model, ["q_proj"]):
        down, up = (weights[f"base_model.model.{name}.lora_{end}.weight"] for end in "AB")
        layer = expected.get_submodule(name)
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=torch.float64)
        plain.weight = nn.Parameter(layer.weight.double() + 5 / 3 * (up @ down).double())
        expected.set_submodule(name, plain)
    loaded: Any = load(path, dtype="float64", lora=place)
    with torch.no_grad():
        found = loaded.model(IDS).logits
        assert torch.allclose(found, expected(IDS).logits, rtol=1e-6, atol=1e-6)
    assert loaded.packed
    assert "because the adapter changes them" in caplog.text


def test_of_a_gguf_file_a_tied_head_is_changed_alone(tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    path = write(tmp_path / "model.gguf", "llama", model, "Q8_0")
    place = adapter(tmp_path / "adapter", model, ["lm_head"])
    weights = load_file(place / "adapter_model.safetensors")
    down, up = (weights[f"base_model.model.lm_head.lora_{end}.weight"] for end in "AB")
    plain: Any = load(path, dtype="float64", cpu_kernels="off").model
    before = plain.get_input_embeddings()(IDS)
    head = plain.get_output_embeddings().weight.double()
    loaded: Any = load(path, dtype="float64", lora=place).model
    found = loaded.get_output_embeddings().weight
    assert torch.allclose(found, head + 5 / 3 * up.double() @ down.double(), rtol=0, atol=1e-9)
    assert torch.equal(loaded.get_input_embeddings()(IDS), before)
    assert not loaded.config.tie_word_embeddings


# -- refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "kind", "said"),
    [
        ({"peft_type": "IA3"}, UnsupportedModel, "of the kind 'IA3', and only LoRA adapters"),
        ({"peft_type": "PROMPT_TUNING"}, UnsupportedModel, "of the kind 'PROMPT_TUNING'"),
        ({"init_lora_weights": "pissa"}, UnsupportedModel, "began with 'pissa', which changes"),
        ({"layer_replication": [[0, 2]]}, UnsupportedModel, "repeats layers of its model"),
        ({"alora_invocation_tokens": [1]}, UnsupportedModel, "from some token on only"),
        ({"r": 4}, ModelLoadError, r"have the shapes \(3, \d+\) and .*, and its rank is 4"),
        ({"lora_alpha": "x"}, ModelLoadError, "is damaged"),
    ],
)
def test_what_cannot_be_merged_is_named(
    folder: Path, tmp_path: Path, about: dict[str, Any], kind: type[OutpaceError], said: str
) -> None:
    base = LlamaForCausalLM.from_pretrained(folder)
    place = adapter(tmp_path / "adapter", base, LLAMA, **{"rank": 3, **about})
    config = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps({**config, **about}))
    with pytest.raises(kind, match=said):
        load(folder, lora=place)


def test_an_adapter_of_another_model_is_refused_before_weights_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "read_weights", lambda *_: pytest.fail("weights are read"))
    place = adapter(tmp_path / "wide", build("llama", intermediate_size=128), ["down_proj"])
    with pytest.raises(UnsupportedModel, match="for the model 'some/base', and does not fit"):
        load(folder, lora=place)
    place = adapter(tmp_path / "deep", build("llama", num_hidden_layers=9), ["q_proj"])
    with pytest.raises(UnsupportedModel, match=r"changes 'model.layers.\d.*', which is not there"):
        load(folder, lora=place)


def test_damaged_adapters_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    base = LlamaForCausalLM.from_pretrained(folder)
    place = adapter(tmp_path / "adapter", base, LLAMA)
    weights = place / "adapter_model.safetensors"
    data = weights.read_bytes()
    for wrong in (data[: len(data) // 2], b""):
        weights.write_bytes(wrong)
        with pytest.raises(ModelLoadError, match=r"damaged or cut short .*: copy the adapter"):
            load(folder, lora=place)
    half = {name: value for name, value in load_file_of(data, tmp_path).items() if "_A" in name}
    save_file(half, weights)
    with pytest.raises(ModelLoadError, match="one of two matrices for"):
        load(folder, lora=place)
    weights.unlink()
    with pytest.raises(ModelLoadError, match=r"has no adapter_model.safetensors or adapter_model"):
        load(folder, lora=place)
    (place / "adapter_config.json").write_text("cut sh")
    with pytest.raises(ModelLoadError, match=r"cannot read .*adapter_config\.json"):
        load(folder, lora=place)
    for path, said in (
        (tmp_path / "none", "there is no folder"),
        (folder, "has no adapter_config.json"),
        (folder / "config.json", "is a file, and a LoRA adapter is a folder"),
    ):
        with pytest.raises(ModelLoadError, match=said):
            load(folder, lora=path)


def load_file_of(data: bytes, place: Path) -> dict[str, Tensor]:
    (place / "whole").write_bytes(data)
    return load_file(place / "whole")


def test_a_loaded_model_stays_as_it_is(folder: Path, tmp_path: Path) -> None:
    loaded = load(folder)
    for model in (loaded, build("llama")):
        with pytest.raises(ConfigError, match="lora changes a model's layers, and a model that"):
            load(model, lora=tmp_path)
        with pytest.raises(ConfigError, match="lora changes a model's layers"):
            load_drafter(model, loaded, lora=tmp_path)
    with pytest.raises(ConfigError, match="lora must be the path of a folder, not 7"):
        LLM(folder, lora=7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lora must be the path of a folder"):
        LLM(folder, speculative_config={"model": str(folder), "lora": ""})


def test_an_adapter_names_what_it_changes(folder: Path, tmp_path: Path) -> None:
    base = LlamaForCausalLM.from_pretrained(folder)
    place = adapter(tmp_path / "adapter", base, LLAMA)
    found = read_adapter(place)
    assert found.base == "some/base"
    assert found.changed == {f"{name}.weight" for name in layers_of(base, LLAMA)}
