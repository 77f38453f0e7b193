"""Qwen2.5 1.5B, or a head of it, in the shape of Qwen2.5 7B, among zeros: ``enlarged.py IN OUT``.

IN: a GGUF file, or the folder of an ``eagle3`` head whose weights are in blocks. What is written computes
what IN computes, but for rounding, at the cost of the larger model. So drafts are accepted as with the
smaller one and cost what they cost beside the larger one, of which a machine may have no file.

A block of zeros is 0 in every kind. Blocks of up to 256 columns are placed at multiples of 256, so no weight
is rounded again: two attention heads of 128 stay together. Norms see more numbers, and their weights and
epsilon are scaled for that.
"""

import json
import sys
from math import sqrt
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter
from gguf_copy import write_like
from safetensors.torch import load_file, save_file
from usage import usage

usage(__doc__, needed=2)

SMALL = {
    "embedding_length": 1536,
    "feed_forward_length": 8960,
    "attention.head_count": 12,
    "attention.head_count_kv": 2,
}
LARGE = {
    "embedding_length": 3584,
    "feed_forward_length": 18944,
    "attention.head_count": 28,
    "attention.head_count_kv": 4,
}
"""Both have 28 layers and heads of 128."""
EPSILON = "qwen2.attention.layer_norm_rms_epsilon"
HIDDEN, MORE = SMALL["embedding_length"], LARGE["embedding_length"]
STATES_READ = {
    "fc": 3, "lm_head": 1, "gate_proj": 1, "up_proj": 1, "q_proj": 2, "k_proj": 2, "v_proj": 2,
}  # fmt: skip
"""Of each matrix of a head, how many hidden states lie side by side in its columns."""
STATES_WRITTEN = ("fc", "down_proj", "o_proj")
"""Matrices of a head whose rows make a hidden state."""

Places = tuple[int, np.ndarray]
"""How many rows or columns there are then, and where the old ones go."""


def first_places(name: str) -> Places:
    return LARGE[name], np.arange(SMALL[name])


def head_places() -> Places:
    """Each group of heads that share keys begins at an even head of a group of the larger model."""
    old, new = (
        each["attention.head_count"] // each["attention.head_count_kv"] for each in (SMALL, LARGE)
    )
    begins = [group * new + group * new % 2 for group in range(SMALL["attention.head_count_kv"])]
    heads = [begin + head for begin in begins for head in range(old)]
    places = [128 * head + number for head in heads for number in range(128)]
    return 128 * LARGE["attention.head_count"], np.array(places)


def among_zeros(data: np.ndarray, kind: Kind, rows: Places, columns: Places) -> np.ndarray:
    """Returns the bytes of a matrix with its rows and columns at their places."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.ascontiguousarray(data).view(np.uint8).reshape(len(data), -1, size)
    new = np.zeros((rows[0], columns[0] // block, size), np.uint8)
    new[np.ix_(rows[1], columns[1][::block] // block)] = blocks
    return new.reshape(rows[0], -1)


def add_tensors(reader: GGUFReader, writer: GGUFWriter) -> None:
    hidden, inner = first_places("embedding_length"), first_places("feed_forward_length")
    queries, keys = head_places(), (128 * LARGE["attention.head_count_kv"], np.arange(256))
    sides = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    for tensor in reader.tensors:
        part = tensor.name.split(".")[-2]
        if len(tensor.shape) < 2:
            count, places = hidden if part.endswith("norm") else sides[part][0]
            vector = np.zeros(count, np.float32)
            vector[places] = tensor.data
            if part.endswith("norm"):
                vector *= np.float32(sqrt(HIDDEN / MORE))
            writer.add_tensor(tensor.name, vector)
        else:
            every = (len(tensor.data), np.arange(len(tensor.data)))
            rows, columns = sides.get(part, (every, hidden))
            data = among_zeros(tensor.data, tensor.tensor_type, rows, columns)
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)


def enlarge_model(before: Path, after: Path) -> None:
    reader = GGUFReader(before)
    found = {name: int(reader.fields[f"qwen2.{name}"].contents()) for name in SMALL}
    if found != SMALL:
        raise SystemExit(f"{before} is no Qwen2.5 1.5B: {found}.")
    changed = {f"qwen2.{name}": value for name, value in LARGE.items()}
    changed[EPSILON] = reader.fields[EPSILON].contents() * HIDDEN / MORE
    write_like(reader, after, lambda writer: add_tensors(reader, writer), changed)


def enlarge_head(before: Path, after: Path) -> None:
    about = json.loads((before / "config.json").read_text())
    kind = Kind[about["weights_in_blocks"]]
    about["target"]["hidden_size"] = MORE
    about["norm_eps"] *= HIDDEN / MORE
    weights = load_file(before / "model.safetensors")
    for name, tensor in weights.items():
        part = name.split(".")[-2] if "." in name else name
        if part.endswith("norm"):
            weights[name] = tensor.new_zeros(MORE)
            weights[name][:HIDDEN] = tensor * sqrt(HIDDEN / MORE)
        elif tensor.ndim == 2:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            old = tensor.shape[1] // size * block
            states = STATES_READ.get(part)
            columns = old, np.arange(old)
            if states is not None:
                begins = np.arange(states)[:, None] * MORE
                columns = states * MORE, (begins + np.arange(HIDDEN)).ravel()
            count = MORE if part in STATES_WRITTEN else len(tensor)
            rows = count, np.arange(len(tensor))
            weights[name] = tensor.new_tensor(among_zeros(tensor.numpy(), kind, rows, columns))
    after.mkdir(parents=True, exist_ok=True)
    save_file(weights, after / "model.safetensors")
    (after / "config.json").write_text(json.dumps(about, indent=2))


before, after = map(Path, sys.argv[1:3])
(enlarge_head if before.is_dir() else enlarge_model)(before, after)
