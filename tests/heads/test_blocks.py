"""Heads whose weights are kept in blocks of 4 bits."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from outpace import LLM, SamplingParams
from outpace.errors import ConfigError, ModelLoadError, UnsupportedModel
from outpace.heads.base import TargetShape
from outpace.heads.checkpoint import IN_BLOCKS, load_head, save_head
from outpace.llm import BUNDLED
from outpace.methods.heads.eagle3 import Eagle3, Eagle3Config
from outpace.targets.cpu.native import native
from outpace.targets.cpu.weights.blocks import block_bytes, to_four_bits

HEAD = BUNDLED / "heads" / "eagle3"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    save_head(load_head(HEAD), tmp_path / "kept", four_bits=True)
    return tmp_path / "kept"


def weights_of(head: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.float() for name, weight in head.state_dict().items()}


def test_weights_come_back_as_they_were_rounded(kept: Path) -> None:
    plain, found = weights_of(load_head(HEAD)), weights_of(load_head(kept))
    assert set(found) == set(plain)
    linear = {
        f"{name}.weight"
        for name, layer in load_head(HEAD).named_modules()
        if type(layer) is nn.Linear
    }
    for name, value in plain.items():
        in_blocks = name in linear
        wanted = to_four_bits(value).dense().bfloat16().float() if in_blocks else value
        assert torch.equal(found[name], wanted), name


def test_the_file_is_a_third_of_one_in_16_bits(tmp_path: Path) -> None:
    head = Eagle3(TargetShape(256, 512, 4), Eagle3Config()).bfloat16()
    save_head(head, tmp_path / "plain")
    save_head(head, tmp_path / "kept", four_bits=True)
    plain, kept = (
        (tmp_path / name / "model.safetensors").stat().st_size for name in ("plain", "kept")
    )
    assert kept < 0.33 * plain


@pytest.mark.skipif(native() is None, reason="needs a C++ compiler")
def test_it_drafts_from_its_blocks_what_the_rounded_head_drafts(kept: Path) -> None:
    prompts, params = ["Once upon a time"], SamplingParams(max_tokens=40, temperature=0)
    found = []
    for model, quantization in ((kept, "auto"), (HEAD, "int4"), (kept, None)):
        config = {
            "method": "eagle3",
            "model": str(model),
            "num_speculative_tokens": 3,
            "quantization": quantization,
        }
        output = LLM(speculative_config=config).generate(prompts, params)[0]
        found.append((output.token_ids, output.metrics.num_target_passes))
    assert found[0] == found[1]  # the same blocks
    assert found[0][0] == found[2][0]  # the text is the target's
    assert abs(found[0][1] - found[2][1]) <= 3  # activations are rounded in the first


def test_its_plain_form_keeps_nothing_in_blocks(kept: Path, tmp_path: Path) -> None:
    assert block_bytes(load_head(kept, blocks=True))
    plain = load_head(kept)
    assert not block_bytes(plain)
    save_head(plain, tmp_path / "published", "eagle3")
    again = weights_of(load_head(tmp_path / "published"))
    assert torch.equal(again["fc.weight"], weights_of(plain)["fc.weight"])


def test_published_formats_have_no_blocks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keeps no weights in 4 bits: use --to outpace"):
        save_head(load_head(HEAD), tmp_path / "out", "eagle3", four_bits=True)


def test_a_head_without_layers_that_fit_is_refused(tmp_path: Path) -> None:
    head = Eagle3(TargetShape(6, 12, 4), Eagle3Config(heads=1, head_dim=6, inner_size=6))
    with pytest.raises(ConfigError, match="no linear layers that blocks of 32 weights fit"):
        save_head(head, tmp_path / "out", four_bits=True)


@pytest.mark.parametrize("fault", ["kind", "size", "scale", "name"])
def test_a_damaged_file_is_named(kept: Path, fault: str) -> None:
    file, config = kept / "model.safetensors", kept / "config.json"
    weights, about = load_file(file), json.loads(config.read_text())
    raw = copy.deepcopy(weights["fc.weight"])
    if fault == "kind":
        about[IN_BLOCKS] = "Q9"
    elif fault == "size":
        weights["fc.weight"] = raw[:, :-20].contiguous()
    elif fault == "scale":
        raw[0, :2] = torch.tensor([float("inf")], dtype=torch.float16).view(torch.uint8)
        weights["fc.weight"] = raw
    else:
        del about[IN_BLOCKS]
    save_file(weights, file)
    config.write_text(json.dumps(about))
    with pytest.raises(ModelLoadError, match="damaged"):
        load_head(kept)


def test_the_head_of_the_repository_can_be_read_and_is_small() -> None:
    folder = Path(__file__).parents[2] / "bundle" / "heads" / "eagle3-qwen2.5-coder-1.5b"
    head = load_head(folder, blocks=True)
    assert (head.kind, head.target.hidden_size, head.vocabulary) == ("eagle3", 1536, 8192)
    assert block_bytes(head)
    assert (folder / "model.safetensors").stat().st_size < 32_000_000


def test_a_weight_beyond_the_scales_is_refused_when_it_is_written(tmp_path: Path) -> None:
    head = load_head(HEAD).float()
    head.get_parameter("fc.weight").data[0, 0] = 1e6
    with pytest.raises(UnsupportedModel, match=r"a weight of 1e\+06"):
        save_head(head, tmp_path / "out", four_bits=True)
