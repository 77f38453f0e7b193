"""Heads as GGUF files, written as llama.cpp's converter writes them, against the folders that they
were converted from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heads.published import SIZE, TOKENS, VOCABULARY, Weights, dflash, drawn, dspark, eagle3
from heads.runs import PROMPTS, plain_texts, target
from heads.variants import READS, both, nested, say
from outpace import LLM
from outpace.errors import ModelLoadError
from outpace.heads.checkpoint import find_head_kind, load_head, save_head
from outpace.inspection import inspect
from targets.generating import greedy, ids

TOP = {
    "fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm", "lm_head": "output",
    "embed_tokens": "token_embd", "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2", "confidence_head.proj": "conf_proj",
}  # fmt: skip
LAYER = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def convert(folder: Path, path: Path, arch: str, kind: str = "F32", **more: Any) -> Path:
    """Writes a folder's head to a file. kind: of its matrices, where blocks of it divide them;
    more: other values of the architecture, None for those to leave out."""
    about = json.loads((folder / "config.json").read_text())
    about |= {**about.get("dflash_config", {}), **about.get("eagle_config", {})}
    weights = load_file(folder / "model.safetensors")
    heads, groups = about["num_attention_heads"], about["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_embedding_length(about["hidden_size"])
    writer.add_feed_forward_length(about["intermediate_size"])
    writer.add_block_count(about["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(about["rms_norm_eps"])
    writer.add_rope_freq_base(about["rope_theta"])
    if "head_dim" in about:
        writer.add_key_length(about["head_dim"])
        writer.add_value_length(about["head_dim"])
    values: dict[str, Any] = {"vocab_size": VOCABULARY}
    if arch == "eagle3":
        values |= {
            "extract_layers": list(READS),
            "target_hidden_size": about.get("target_hidden_size", SIZE),
            "norm_before_residual": about.get("norm_before_residual", False),
        }
    else:
        values |= {
            "block_size": about["block_size"],
            "target_layers": [at + 1 for at in about["target_layer_ids"]],
        }
        writer.add_mask_token_id(about["mask_token_id"])
        if about.get("sliding_window"):
            values["attention.sliding_window"] = about["sliding_window"]
            types = about["layer_types"]
            values["attention.sliding_window_pattern"] = [t == "sliding_attention" for t in types]
    for name, value in {**values, **more}.items():
        if value is not None:
            put(writer, f"{arch}.{name}", value)
    for name, weight in weights.items():
        if name == "t2d":
            continue
        if name == "d2t":
            writer.add_tensor("d2t", (weight + torch.arange(len(weight))).numpy())
            continue
        array = weight.float()
        if arch == "eagle3" and "_proj" in name and name[name.index("_proj") - 1] in "qk":
            array = permuted(array, heads if "q_proj" in name else groups)
        store(writer, renamed(name), array.numpy(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def put(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_uint32(name, value)


def store(writer: gguf.GGUFWriter, name: str, array: Any, kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    if kind == "F32" or array.ndim < 2 or array.shape[-1] % gguf.GGML_QUANT_SIZES[type_][0]:
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, type_), raw_dtype=type_)


def permuted(weight: Tensor, heads: int) -> Tensor:
    """As llama.cpp turns the halves of Llama's heads into pairs."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape).contiguous()


def renamed(name: str) -> str:
    name = name.replace("midlayer.", "layers.0.")
    stem, _, ending = name.rpartition(".")
    if stem.startswith("layers."):
        _, layer, part = stem.split(".", 2)
        return f"blk.{layer}.{LAYER[part]}.{ending}"
    return f"{TOP[stem]}.{ending}"


def wide(about: dict[str, Any], weights: Weights) -> None:
    """Matrices that blocks of 32 divide."""
    about["intermediate_size"] = 32
    for name in list(weights):
        if name.endswith("down_proj.weight"):
            weights |= drawn({name: (SIZE, 32)})
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            weights |= drawn({name: (32, SIZE)})


def biased(about: dict[str, Any], weights: Weights) -> None:
    nested(*READS)(about, weights)
    about["attention_bias"] = True
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"midlayer.self_attn.{part}"
        weights |= drawn({f"{name}.bias": (len(weights[f"{name}.weight"]),)})


INSIDE = {"mask_token_id": 17, "target_layer_ids": [1, 5, 10]}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5,
    "use_sliding_window": True, "is_causal": False, "dflash_config": INSIDE,
}  # fmt: skip
CASES: Mapping[str, Any] = {
    "eagle3": (eagle3, nested(*READS), "eagle3"),
    "eagle3, norm": (eagle3, nested(*READS, norm_before_residual=True), "eagle3"),
    "eagle3, biases": (eagle3, biased, "eagle3"),
    "dflash": (dflash, say(dflash_config=INSIDE), "dflash"),
    "dflash, windows": (dflash, say(**SLIDING), "dflash"),
    "dspark": (dspark, lambda about, weights: None, "dflash"),
    "dspark by its own name": (dspark, lambda about, weights: None, "dspark"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_holds_the_head_of_its_folder(name: str, tmp_path: Path) -> None:
    make, change, arch = CASES[name]
    make(tmp_path / "folder", change)
    path = convert(tmp_path / "folder", tmp_path / "head.gguf", arch)
    wanted, found = load_head(tmp_path / "folder"), load_head(path)
    assert find_head_kind(path) == wanted.kind
    assert (type(found), found.hidden_layers) == (type(wanted), wanted.hidden_layers)
    skipped = {"norm_eps", "reads"}  # float32 in a file; none given: the usual
    ours, theirs = (
        {name: value for name, value in asdict(each.config).items() if name not in skipped}
        for each in (found, wanted)
    )
    assert ours == theirs
    for weight, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[weight].to(value.dtype), value), weight
    save_head(found, tmp_path / "again", "speculators")
    again = load_head(tmp_path / "again")
    assert all(torch.equal(again.state_dict()[w], v) for w, v in found.state_dict().items())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_blocks_are_dequantized(kind: str, tmp_path: Path) -> None:
    dspark(tmp_path / "folder", both(lambda about, weights: None, wide))
    found = load_head(convert(tmp_path / "folder", tmp_path / "head.gguf", "dflash", kind))
    weight = load_file(tmp_path / "folder" / "model.safetensors")["layers.0.mlp.down_proj.weight"]
    type_ = gguf.GGMLQuantizationType[kind]
    wanted = gguf.quants.dequantize(gguf.quants.quantize(weight.float().numpy(), type_), type_)
    part = found.get_parameter("stack.0.mlp.down_proj.weight")
    assert torch.equal(part.float(), torch.from_numpy(wanted))


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark"])
def test_a_file_drafts_and_the_text_is_the_target_s(name: str, tmp_path: Path) -> None:
    make, change, arch = CASES[name]
    make(tmp_path / "folder", change)
    path = convert(tmp_path / "folder", tmp_path / "head.gguf", arch)
    drafted = []
    for place in (path, tmp_path / "folder"):
        config = {"model": place, "check": False, "num_speculative_tokens": 3, "quantization": None}
        llm = LLM(target(), speculative_config={"method": name, **config}, max_num_seqs=3)
        outputs = llm.generate(PROMPTS, greedy(8))
        assert ids(outputs) == plain_texts()
        drafted.append([output.metrics.num_target_passes for output in outputs])
    assert drafted[0] == drafted[1]
    found = inspect(str(path))
    assert (found.kind, found.facts["depths"]) == ("head", load_head(path).config.depths)
    assert name in found.what


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"target_layers": None}, r"it has no dflash\.target_layers"),
        ({"block_size": None}, "no block_size"),
        ({"markov_head_type": "fir"}, "markov_head_type is 'fir'"),
        ({"target_layers": [2, 6]}, "damaged, or not those"),
    ],
)
def test_a_file_that_does_not_fit_is_named(
    more: Mapping[str, Any], sentence: str, tmp_path: Path
) -> None:
    dspark(tmp_path / "folder")
    path = convert(tmp_path / "folder", tmp_path / "head.gguf", "dflash", **more)
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        load_head(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    assert len(TOKENS) < VOCABULARY
    dspark(tmp_path / "folder")
    path = convert(tmp_path / "folder", tmp_path / "head.gguf", "dflash")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ModelLoadError, match="damaged or cut short"):
        load_head(path)
