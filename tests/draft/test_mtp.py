"""Modules that a checkpoint brings along. The folders are made here, in both ways of naming."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from devices import DEVICE, on_device
from outpace import LLM
from outpace.draft.base import Rows
from outpace.errors import ModelLoadError, UnsupportedModel
from outpace.inspection import inspect
from outpace.methods.heads.mtp import MtpDrafter, load_mtp_module
from outpace.targets.hf.loading.loaded import LoadedModel
from targets.families import CONTEXT, PROMPTS, build, drafter, target
from targets.generating import greedy, ids

WIDTH = 32
PREFIXES = {"deepseek_v3": "model.layers.2.", "qwen3": "mtp."}
NAMES = {
    "deepseek_v3": ("enorm", "hnorm", "shared_head.norm", "eh_proj"),
    "qwen3": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"),
}


@lru_cache
def whole(family: str) -> Any:
    """A model of three layers, the last of which becomes the module's."""
    return build(family, num_hidden_layers=3)


def extras() -> list[Tensor]:
    """The weights of the two norms before it, of the one after it, and of ``eh_proj``."""
    generator = torch.Generator().manual_seed(0)
    norms = [1 + torch.rand(WIDTH, generator=generator, dtype=torch.float64) for _ in range(3)]
    joined = torch.randn(WIDTH, 2 * WIDTH, generator=generator, dtype=torch.float64) * 0.2
    joined[:, WIDTH:] += torch.eye(WIDTH)
    return [*norms, joined]


def checkpoint(folder: Path, family: str) -> Any:
    """Writes a model of two layers with a module after them, and returns the model loaded."""
    whole(family).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    if family == "qwen3":
        weights = {
            name.replace("model.layers.2.", "mtp.layers.0."): value
            for name, value in weights.items()
        }
    for name, value in zip(NAMES[family], extras(), strict=True):
        weights[f"{PREFIXES[family]}{name}.weight"] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    about = json.loads((folder / "config.json").read_text())
    about["num_hidden_layers"] = 2
    if about.get("layer_types"):
        about["layer_types"] = about["layer_types"][:2]
    (folder / "config.json").write_text(json.dumps(about))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    return model.to(DEVICE).eval()


@torch.no_grad()
def expected(family: str, model: Any, text: list[int]) -> Tensor:
    """The logits of the module after a text, by the layer of the whole model."""
    enorm, hnorm, after, joined = (weight.to(DEVICE) for weight in extras())
    ids = on_device([text])
    states = model(ids, output_hidden_states=True).hidden_states[-1][:, :-1]
    eps = model.config.rms_norm_eps

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (WIDTH,), weight, eps)

    embedded = normed(model.get_input_embeddings()(ids[:, 1:]), enorm)
    x = torch.cat([embedded, normed(states, hnorm)], -1) @ joined.T
    at = torch.arange(x.shape[1], device=DEVICE)[None]
    base = whole(family).model
    mask = (at <= at.T)[None, None]  # an entry sees the earlier ones and itself
    x = base.layers[2](
        x, attention_mask=mask, position_ids=at, position_embeddings=base.rotary_emb(x, at)
    )
    return model.lm_head(normed(x, after))[0, -1]


@pytest.mark.parametrize("family", list(PREFIXES))
def test_the_module_of_a_folder_drafts(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint(tmp_path, family)
    seen: list[tuple[list[int], Tensor]] = []
    begin = MtpDrafter.draft_steps

    def draft_steps(self: MtpDrafter, rows: Rows) -> Any:
        made = begin(self, rows)
        known = [rows.since(row, 0) for row in range(len(rows))]
        seen.extend(zip(known, made.first(), strict=True))
        return made

    monkeypatch.setattr(MtpDrafter, "draft_steps", draft_steps)
    plain = LLM(model, max_num_seqs=4, max_model_len=CONTEXT).generate(PROMPTS, greedy(12))
    config = {"method": "mtp", "num_speculative_tokens": 3}
    llm = LLM(model, speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)
    assert ids(llm.generate(PROMPTS, greedy(12))) == ids(plain)
    checked = [(text, found) for text, found in seen if len(text) > 1][::5]
    assert len(checked) > 4
    for text, found in checked:
        assert torch.allclose(found, expected(family, model, text), atol=1e-5)  # float32 norms


def test_a_target_without_a_module_says_so(tmp_path: Path) -> None:
    config = {"method": "mtp", "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedModel, match="comes from no folder"):
        LLM(target("llama"), speculative_config=config)
    build("llama").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    with pytest.raises(UnsupportedModel, match="brings no multi-token-prediction module"):
        LLM(model, speculative_config=config)


def test_auto_drafts_with_what_the_target_brings(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "deepseek_v3")
    limits = {"max_num_seqs": 4, "max_model_len": CONTEXT}
    plain = LLM(model, speculative_config={"method": "none"}, **limits)
    expected = ids(plain.generate(PROMPTS, greedy(12)))
    assert plain.describe().drafts_with is None
    for config in ({}, {"num_speculative_tokens": 3}, {"verify": "match"}):
        llm = LLM(model, speculative_config=config, **limits)
        assert ids(llm.generate(PROMPTS, greedy(12))) == expected
        assert llm.describe().drafts_with == "its multi-token-prediction module"
        assert "its multi-token-prediction module drafts" in str(llm.describe())
    chains = LLM(model, speculative_config={"verify": "token"}, **limits)  # modules draft trees
    assert chains.describe().drafts_with is None
    state = {"state": str(tmp_path / "learned.json")}
    LLM(model, speculative_config=state, **limits).generate(PROMPTS, greedy(4))
    assert "mtp" in json.loads((tmp_path / "learned.json").read_text())["drafters"]
    named = LLM(model, speculative_config={"model": drafter("deepseek_v3")}, **limits)
    assert named.describe().drafts_with is None


def test_auto_does_without_a_module_that_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = checkpoint(tmp_path, "deepseek_v3")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.2.self_attn.o_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(model, max_model_len=CONTEXT)
    assert llm.describe().drafts_with is None
    assert "lacks 1 of its weights ('model.layers.0.self_attn.o_proj.weight' is one)" in caplog.text
    with pytest.raises(ModelLoadError, match="lacks 1 of its weights"):
        LLM(model, speculative_config={"method": "mtp"})


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        ({"model.layers.2.hnorm.weight": None}, UnsupportedModel, "nothing that is called 'hnorm'"),
        ({"model.layers.2.enorm.weight": torch.ones(3)}, ModelLoadError, "has the shapes"),
        ({"model.layers.2.odd.weight": torch.ones(3)}, UnsupportedModel, "has no place for"),
        (
            {"model.layers.2.eh_proj.weight": torch.ones(WIDTH, 2 * WIDTH).to(torch.float8_e4m3fn)},
            UnsupportedModel,
            r"is quantised \('model.layers.2.eh_proj.weight' is one of its weights\)",
        ),
        (
            {"model.layers.2.self_attn.o_proj.weight_scale_inv": torch.ones(1, 1)},
            UnsupportedModel,
            r"is quantised \('model.layers.2.self_attn.o_proj.weight' is one of its weights\)",
        ),
    ],
)
def test_modules_that_are_not_read_get_a_sentence(
    change: dict[str, Any], kind: type[Exception], reason: str, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path, "deepseek_v3")
    weights = {**load_file(tmp_path / "model.safetensors"), **change}
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(kind, match=reason):
        LLM(model, speculative_config={"method": "mtp"})


def test_embeddings_and_heads_of_their_own_are_used(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "deepseek_v3")
    weights = load_file(tmp_path / "model.safetensors")
    own = {
        "embed_tokens": weights["model.embed_tokens.weight"],
        "shared_head.head": weights["lm_head.weight"],
    }
    for factor, same in ((1.0, True), (2.0, False)):
        more = {f"model.layers.2.{name}.weight": own[name] * factor for name in own}
        save_file({**weights, **more}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        head = load_mtp_module(LoadedModel(model, None, "a model"))
        assert (head.embed is None) == (head.lm_head is None) == same
        assert head.shares_lm_head == same


def test_a_folder_says_that_it_brings_modules(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3")
    found = inspect(str(tmp_path))
    assert found.facts["multi_token_prediction"]
    assert f"outpace generate -m {tmp_path} --method mtp" in found.commands


def library(folder: Path, source: Path) -> Path:
    """The module of a folder as the library `speculators` saves it, without the target."""
    parts = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
             "shared_head.norm": "final_layernorm"}  # fmt: skip
    weights = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.startswith(PREFIXES["deepseek_v3"]):
            inside = name.removeprefix(PREFIXES["deepseek_v3"])
            stem, _, end = inside.rpartition(".")
            weights[f"mtp_layers.0.{parts.get(stem, stem)}.{end}"] = weight
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    layer = json.loads((source / "config.json").read_text())
    about = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "speculators_config": {
            "algorithm": "mtp",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "a/model", "architectures": []},
        },
        "transformer_layer_config": layer,
    }
    (folder / "config.json").write_text(json.dumps(about))
    return folder


def test_a_module_of_the_library_speculators(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    model = checkpoint(tmp_path / "target", "deepseek_v3")
    folder = library(tmp_path / "module", tmp_path / "target")
    loaded = LoadedModel(model, None, "a model")
    found, expected = load_mtp_module(loaded, str(folder)), load_mtp_module(loaded)
    assert not found.config.states_first
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name
    limits = {"max_num_seqs": 4, "max_model_len": CONTEXT}
    plain = LLM(model, speculative_config={"method": "none"}, **limits)
    llm = LLM(model, speculative_config={"model": str(folder), "check": False}, **limits)
    assert ids(llm.generate(PROMPTS, greedy(12))) == ids(plain.generate(PROMPTS, greedy(12)))
    told = inspect(str(folder))
    assert "multi-token-prediction module" in told.what
    assert told.commands == (f"outpace generate -m TARGET --method mtp --draft {folder}",)
    assert inspect(str(folder), str(tmp_path / "target")).why_not is None
    build("llama").save_pretrained(tmp_path / "other")
    assert "is one of a deepseek_v3" in str(inspect(str(folder), str(tmp_path / "other")).why_not)
