"""Multi-token-prediction modules in GGUF files: after the layers, and in files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outpace import LLM
from outpace.errors import ModelLoadError, UnsupportedModel
from outpace.inspection import inspect
from outpace.methods.heads.mtp import MtpDrafter
from targets.generating import greedy, ids
from targets.gguf.files import _tensors, tiny, write

PROMPTS = [[1, 5, 9, 3], [7, 7], [2, 8, 4, 4, 1, 6, 3]]
LENGTH = 16
ARCHITECTURES = {"qwen35": 1.0, "qwen35moe": 1.0, "glm4moe": 0.0, "deepseek2": 0.0}
"""What the norms of each add to their weights."""
AROUND = ("enorm", "hnorm", "shared_head_norm")


def model_and_module(arch: str) -> tuple[Any, Any]:
    """A model, and one of a single layer that attends, which is the module's."""
    if not arch.startswith("qwen"):
        return tiny(arch), tiny(arch, num_hidden_layers=1, first_k_dense_replace=0)
    types = ["linear_attention", "full_attention"]
    return tiny(arch, layer_types=types), tiny(
        arch, num_hidden_layers=1, layer_types=["full_attention"]
    )


def extras(width: int) -> dict[str, Any]:
    """What stands around the layer of a module, as the model holds it."""
    numbers = np.random.default_rng(0)
    found = {name: numbers.normal(0, 0.3, width).astype(np.float32) for name in AROUND}
    joined = numbers.normal(0, 0.1, (width, 2 * width)).astype(np.float32)
    joined[:, width:] += np.eye(width, dtype=np.float32)
    return {**found, "eh_proj": joined}


def tensors(arch: str, module: Any, layer: int) -> dict[str, Any]:
    """The tensors of a module, as llama.cpp's converter writes them: norms with 1 added."""
    found = {
        name.replace("blk.0.", f"blk.{layer}."): numbers
        for name, numbers in _tensors(arch, module).items()
        if name.startswith("blk.0.")
    }
    for name, numbers in extras(module.config.hidden_size).items():
        offset = 0.0 if name == "eh_proj" else ARCHITECTURES[arch]
        found[f"blk.{layer}.nextn.{name}.weight"] = numbers + offset
    return found


def said(arch: str, layers: int) -> dict[str, Any]:
    """What a file with a module says of itself."""
    found = {f"{arch}.block_count": layers + 1, f"{arch}.nextn_predict_layers": 1}
    if not arch.startswith("qwen"):
        return found
    return {**found, f"{arch}.attention.recurrent_layers": [True, *[False] * layers]}


def file_with(path: Path, arch: str, kind: str = "F32", **more: Any) -> tuple[Path, Any, Any]:
    model, module = model_and_module(arch)
    own = tensors(arch, module, 2)
    for name in more.pop("lacking", ()):
        del own[name]
    write(path, arch, model, kind, changes=said(arch, 2), tensors={**own, **more})
    return path, model, module


def module_alone(path: Path, arch: str) -> Path:
    """A file with a module and what goes with it, as ``convert_hf_to_gguf.py --mtp`` writes."""
    model, module = model_and_module(arch)
    trunk = [name for name in _tensors(arch, model) if name.startswith("blk.")]
    return write(
        path, arch, model, changes=said(arch, 2), tensors=tensors(arch, module, 2), without=trunk
    )


@torch.no_grad()
def expected(
    arch: str, model: Any, module: Any, states: torch.Tensor, text: list[int]
) -> torch.Tensor:
    """The logits after a text, by transformers' layer of the family."""
    own = {name: torch.from_numpy(numbers) for name, numbers in extras(states.shape[-1]).items()}
    eps = model.config.rms_norm_eps

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = own[name] + ARCHITECTURES[arch]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    embedded = model.get_input_embeddings()(torch.tensor([text[1:]]))
    pair = [normed(embedded, "enorm"), normed(states[None], "hnorm")]
    module.model.norm.weight.copy_(own["shared_head_norm"])
    x = torch.cat(pair, -1) @ own["eh_proj"].T
    found: torch.Tensor = module.model(inputs_embeds=x, use_cache=False).last_hidden_state
    return model.lm_head(found[0, -1])


@pytest.mark.parametrize("arch", list(ARCHITECTURES))
@pytest.mark.parametrize("alone", [False, True])
def test_modules_of_files_draft(
    arch: str, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model, module = file_with(tmp_path / "model.gguf", arch)
    config: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3}
    if alone:
        write(path, arch, model)
        config["model"] = str(module_alone(tmp_path / "mtp-model.gguf", arch))
        config["check"] = False  # a random module is right next to never
    seen: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
    states: dict[Any, torch.Tensor] = {}
    walk, read = MtpDrafter.draft_steps, MtpDrafter.read

    def watched_read(drafter: Any, requests: Any, tokens: Any, found: torch.Tensor) -> None:
        for request, new, own in zip(requests, tokens, found, strict=True):
            before = states.get(request, own[:0])
            states[request] = torch.cat([before, own[: len(new)]])
        read(drafter, requests, tokens, found)

    def watched(drafter: Any, rows: Any) -> Any:
        made = walk(drafter, rows)
        for row, logits in enumerate(made.first()):
            seen.append((rows.since(row, 0), states[rows.requests[row]], logits))
        return made

    limits = {"max_num_seqs": 4, "max_model_len": 64, "cpu_kernels": "off"}
    plain = LLM(str(path), speculative_config={"method": "none"}, **limits)
    wanted = ids(plain.generate(PROMPTS, greedy(LENGTH)))
    llm = LLM(str(path), speculative_config=config, enable_prefix_caching=False, **limits)
    monkeypatch.setattr(MtpDrafter, "read", watched_read)
    monkeypatch.setattr(MtpDrafter, "draft_steps", watched)
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == wanted
    assert len(seen) > 12
    for text, known, logits in seen[::6]:
        assert torch.allclose(logits, expected(arch, model, module, known, text), atol=1e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_modules_stay_in_blocks(kind: str, tmp_path: Path) -> None:
    path, _, _ = file_with(tmp_path / "model.gguf", "qwen35", kind)
    limits = {"max_num_seqs": 4, "max_model_len": 64}
    texts = {}
    for config in ({"method": "none"}, {"method": "mtp", "num_speculative_tokens": 3}, {}):
        llm = LLM(str(path), speculative_config=config, **limits)
        texts[str(config)] = ids(llm.generate(PROMPTS, greedy(LENGTH)))
    assert len({str(each) for each in texts.values()}) == 1
    assert llm.describe().drafts_with == "its multi-token-prediction module"


def test_damaged_modules_get_a_sentence(tmp_path: Path) -> None:
    config = {"method": "mtp", "num_speculative_tokens": 3}
    for name, lacking, more, reason in (
        ("a", ["blk.2.nextn.hnorm.weight"], {}, r"lacks weights \('hnorm' is one\)"),
        ("b", ["blk.2.attn_q.weight"], {}, "lacks 1 of the weights"),
        ("c", [], {"blk.2.nextn.enorm.weight": np.ones(3)}, r"has the shape \(3,\)"),
    ):
        path, _, _ = file_with(tmp_path / f"{name}.gguf", "qwen35", lacking=lacking, **more)
        with pytest.raises(ModelLoadError, match=reason):
            LLM(str(path), speculative_config=config)
        LLM(str(path), speculative_config={}, max_model_len=64)  # look-ups draft alone


def test_files_of_modules_are_told_from_models(tmp_path: Path) -> None:
    path = module_alone(tmp_path / "mtp-model.gguf", "qwen35")
    with pytest.raises(UnsupportedModel, match="holds the multi-token-prediction modules of a mod"):
        LLM(str(path))
    found = inspect(str(path))
    assert found.why_not is None
    assert "multi-token-prediction" in found.what
    assert found.commands == (f"outpace generate -m TARGET --method mtp --draft {path}",)
    target, _, _ = file_with(tmp_path / "model.gguf", "qwen35")
    assert inspect(str(target)).facts["multi_token_prediction"]
    assert inspect(str(path), str(target)).why_not is None
    other = write(tmp_path / "other.gguf", "llama", tiny("llama"))
    assert "and this target is a llama" in str(inspect(str(path), str(other)).why_not)
    with pytest.raises(UnsupportedModel, match="and this target is a llama"):
        LLM(str(other), speculative_config={"method": "mtp", "model": str(path)})
