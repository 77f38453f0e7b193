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
from outpace.errors import UnsupportedModel
from outpace.methods.heads.mtp import MtpDrafter
from outpace.targets.hf.kinds import older_than
from targets.families import CONTEXT, PROMPTS, build, target
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


READ_SINCE = {"qwen3": "5.20"}


@pytest.mark.parametrize("family", list(PREFIXES))
def test_the_module_of_a_folder_drafts(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint(tmp_path, family)
    if family in READ_SINCE and older_than(READ_SINCE[family]):
        config = {"method": "mtp", "num_speculative_tokens": 3}
        with pytest.raises(UnsupportedModel, match=r"or install transformers 5\.20 or later"):
            LLM(model, speculative_config=config)
        return
    seen: list[tuple[list[int], Tensor]] = []
    begin = MtpDrafter.walk

    def walk(self: MtpDrafter, rows: Rows) -> Any:
        made = begin(self, rows)
        known = [rows.since(row, 0) for row in range(len(rows))]
        seen.extend(zip(known, made.first(), strict=True))
        return made

    monkeypatch.setattr(MtpDrafter, "walk", walk)
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
