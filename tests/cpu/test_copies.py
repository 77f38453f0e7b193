"""A loaded model can be copied, sent to another process, and saved, whatever its layers are."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outpace.errors import ConfigError
from outpace.targets.cpu import native as building
from outpace.targets.cpu.kernels import MIN_ELEMENTS, available
from outpace.targets.cpu.native import Build, native
from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.native_layers.linear import NativeLinear
from outpace.targets.cpu.native_layers.model import NativeModel
from outpace.targets.cpu.weights import quantize as quantising
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.runner import Runner
from processes import START_SECONDS

VOCABULARY = 96
ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}


def _model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**sizes, **ENDS)).eval()
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, initializer_range=0.2,
        tie_word_embeddings=family == "tied", **ENDS,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # as if it had been saved in 16 bits
            parameter.copy_(parameter.bfloat16())
    return model


OPTIONS: dict[str, dict[str, Any]] = {
    "ours": {},
    "packed": {"cpu_kernels": "packed"},
    "blocked": {"cpu_kernels": "blocked"},
    "8 bits": {"quantization": "int8"},
    "8 bits, oneDNN's": {"quantization": "int8"},
}


@pytest.fixture(params=OPTIONS)
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in MIN_ELEMENTS:
        monkeypatch.setitem(MIN_ELEMENTS, name, 1)
    if request.param == "8 bits, oneDNN's":
        monkeypatch.setattr(quantising, "native", lambda: None)
    return OPTIONS[request.param]


@pytest.fixture(params=["tied", "untied", "gpt2"])
def loaded(request: pytest.FixtureRequest, options: dict[str, Any], tmp_path: Path) -> Any:
    _model(request.param).save_pretrained(tmp_path / "saved")
    return load(tmp_path / "saved", **options).model


def _logits(model: nn.Module) -> Tensor:
    runner = Runner(model, rows=1, max_length=32)
    runner.admit(1)
    logits: Tensor = runner.forward(torch.tensor([[5, 6, 7]]), keep=3).logits
    return logits


SCORE = """
import pickle, sys, torch
from pathlib import Path
torch.set_num_threads(1)
ids, mask, models = pickle.loads(Path(sys.argv[1]).read_bytes())
with torch.inference_mode():
    logits = [model(ids, attention_mask=mask, use_cache=False).logits.clone() for model in models]
Path(sys.argv[2]).write_bytes(pickle.dumps(logits))
"""


@torch.inference_mode()
def test_copies_compute_the_same_bits_by_themselves(loaded: Any) -> None:
    expected = _logits(loaded)
    copies = copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))
    for found in copies:
        assert torch.equal(_logits(found), expected)
        assert isinstance(found.forward, NativeModel) == isinstance(loaded.forward, NativeModel)
    for parameter in loaded.parameters():
        parameter.zero_()
    assert not torch.equal(_logits(loaded), expected)
    for found in copies:
        assert torch.equal(_logits(found), expected), "nothing is shared with the model"


@torch.inference_mode()
def test_another_process_reads_pickled_models(tmp_path: Path) -> None:
    _model("tied").save_pretrained(tmp_path)
    models = [load(tmp_path, cpu_kernels=kernels).model for kernels in ("auto", "packed")]
    ids, mask = torch.tensor([[5, 6, 7]]), torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    pickled, scored = tmp_path / "models", tmp_path / "logits"
    pickled.write_bytes(pickle.dumps((ids, mask, models)))
    command = [sys.executable, "-c", SCORE, str(pickled), str(scored)]
    subprocess.run(command, check=True, timeout=START_SECONDS)
    for model, found in zip(models, pickle.loads(scored.read_bytes()), strict=True):
        assert torch.equal(found, model(ids, attention_mask=mask, use_cache=False).logits)


@torch.inference_mode()
def test_a_saved_model_is_a_plain_one(loaded: Any, tmp_path: Path) -> None:
    expected = _logits(loaded)
    loaded.save_pretrained(tmp_path / "again")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32).eval()
    found = _logits(plain)
    # Integer products round activations: those of blocks to 8 bits, and without a compiler to 15.
    rounds = any(isinstance(module, NativeBlockLinear) for module in loaded.modules())
    most = (0.1 if rounds else 2e-3) * float(expected.std())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=most)
    if rounds:
        assert torch.equal(plain.lm_head.weight, loaded.lm_head.weight)
    assert not any(isinstance(module, NativeLinear) for module in plain.modules())


@pytest.mark.skipif(native() is None, reason="no C++ compiler here")
def test_where_the_library_is_missing_a_pickled_model_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MIN_ELEMENTS, "native", 1)
    _model("untied").save_pretrained(tmp_path)
    written = pickle.dumps(load(tmp_path, cpu_kernels="native").model.lm_head, protocol=4)
    monkeypatch.setattr(building, "build", lambda: Build(None, "g++ is not found"))
    with pytest.raises(ConfigError, match="lacks because g\\+\\+ is not found: load the model"):
        pickle.loads(written)


@pytest.mark.skipif(native() is None, reason="no C++ compiler here")
@torch.inference_mode()
def test_panels_of_another_processor_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _model("untied").save_pretrained(tmp_path)
    monkeypatch.setitem(MIN_ELEMENTS, "native", 1)
    layer: Any = load(tmp_path, cpu_kernels="native").model.lm_head
    x = torch.randn(3, 64)
    expected, weight = layer(x), layer.weight
    state = layer.__getstate__()
    half = layer.panels.shape[2] // 2
    wide = weight.view(-1, half, 64).transpose(1, 2).contiguous()  # [N / half, K, half]
    state["_parameters"] = {**state["_parameters"], "panels": nn.Parameter(wide, False)}
    found = NativeLinear.__new__(NativeLinear)
    found.__setstate__(state)
    found._fused = type(layer._fused)(layer.library, [found])
    assert found.panels.shape == layer.panels.shape
    assert torch.equal(found.weight, weight)
    assert torch.equal(found(x), expected)


@pytest.mark.skipif(native() is None, reason="no C++ compiler here")
@torch.inference_mode()
def test_a_weight_in_a_dtype_that_is_not_known_here_is_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native()
    assert library is not None
    _model("untied").save_pretrained(tmp_path)
    monkeypatch.setitem(MIN_ELEMENTS, "native", 1)
    layer: Any = load(tmp_path, cpu_kernels="native").model.lm_head
    x = torch.randn(3, 64)
    expected, state = layer(x), pickle.dumps(layer)
    assert layer.read.dtype == torch.bfloat16
    monkeypatch.setattr(library, "takes", lambda dtype: dtype == torch.float32)
    found = pickle.loads(state)
    assert found.read.dtype == torch.float32
    assert torch.equal(found(x), expected)
    assert not available()["native"].suits(nn.Linear(512, 512).half())


@pytest.mark.skipif(native() is None, reason="no C++ compiler here")
@torch.inference_mode()
def test_layers_that_longer_vectors_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native()
    assert library is not None
    _model("untied").save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert isinstance(loaded.model.forward, NativeModel)
    written = pickle.dumps(loaded)
    monkeypatch.setattr(library, "lanes", 64)  # heads have 32 numbers
    with pytest.raises(ConfigError, match=r"shorter vectors.*: load the model from its folder"):
        _logits(pickle.loads(written).model)
