"""A Qwen2 GGUF file in the shape of a larger model, zeros around its weights: ``enlarged.py IN OUT SIZE``.

IN may also be a folder with the ``eagle3`` head of the smaller model. SIZE: ``7B``, ``14B`` or ``32B`` of Qwen2.5. The file computes what the smaller model computes, but for rounding, at
the cost of the larger one. So drafts are accepted as with the smaller model, and cost what they cost
beside the larger one: it tells what a small drafter brings to a target that a machine has no file of.

A block of zeros is 0 in every kind. What comes in blocks of 256 columns is placed at multiples of 256,
so no weight is rounded again: attention heads come in pairs. The norms see more numbers, and their weights
and epsilon are scaled for that.
"""

import json
import sys
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFReader, ReaderTensor
from safetensors.torch import load_file, save_file
from usage import usage

usage(__doc__, needed=3)

OWN = ("GGUF.", "general.architecture")
"""Entries that the writer makes by itself."""
HEAD = 128
HIDDEN_STATES_READ = {
    "fc": 3,
    "lm_head": 1,
    "gate_proj": 1,
    "up_proj": 1,
    "q_proj": 2,
    "k_proj": 2,
    "v_proj": 2,
}
"""Of each matrix of a head, how many hidden states lie side by side in its columns."""
HIDDEN_STATES_WRITTEN = ("fc", "down_proj", "o_proj")
"""Matrices of a head whose rows make a hidden state."""


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    heads: int
    groups: int
    layers: int


SHAPES = {
    "7B": Shape(3584, 18944, 28, 4, 28),
    "14B": Shape(5120, 13824, 40, 8, 48),
    "32B": Shape(5120, 27648, 40, 8, 64),
}


def head_places(small: Shape, large: Shape) -> tuple[list[int], dict[int, int]]:
    """Returns where each attention head goes, and by place of a key head whose keys it has.

    Two heads that lie in one block of columns stay together; a group of the larger model, which
    shares keys, takes heads of one group of the smaller one.
    """
    of_group, in_large = small.heads // small.groups, large.heads // large.groups
    places, keys, group = [], {}, 0
    for old in range(small.groups):
        left = of_group
        while left:
            first = group * in_large + group * in_large % 2
            room = (group + 1) * in_large - first
            taken = min(left, room - room % 2)
            places += range(first, first + taken)
            keys[group] = old
            left, group = left - taken, group + 1
    if group > large.groups:
        raise SystemExit("The larger model has too few groups of heads.")
    return places, keys


def elements(tensor: ReaderTensor) -> tuple[np.ndarray, int, int]:
    """Returns the bytes of a tensor's rows, ``[rows, bytes]``, and how many numbers a block has, in
    how many bytes."""
    block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    return np.ascontiguousarray(rows).view(np.uint8), block, size


def placed(
    tensor: ReaderTensor, rows: tuple[int, list[int]], columns: tuple[int, list[int]]
) -> np.ndarray:
    """Returns the bytes of a matrix among zeros: rows and columns are how many there are then, and where
    those of the tensor go."""
    old, block, size = elements(tensor)
    count, places = columns
    blocks = old.reshape(len(old), -1, size)
    starts = np.asarray(places[::block]) // block
    new = np.zeros((rows[0], count // block, size), np.uint8)
    new[np.ix_(rows[1], starts)] = blocks
    return new.reshape(rows[0], -1)


def of_heads(places: list[int], count: int) -> tuple[int, list[int]]:
    return count * HEAD, [place * HEAD + number for place in places for number in range(HEAD)]


def enlarged(reader: GGUFReader, writer: gguf.GGUFWriter, small: Shape, large: Shape) -> None:
    heads, keys = head_places(small, large)
    hidden = (large.hidden, list(range(small.hidden)))
    inner = (large.inner, list(range(small.inner)))
    queries = of_heads(heads, large.heads)
    key_rows = of_heads(list(keys), large.groups)
    of_keys = [old * HEAD + number for old in keys.values() for number in range(HEAD)]
    scale = np.float32(sqrt(small.hidden / large.hidden))
    sides = {
        "attn_q": (queries, hidden),
        "attn_k": (key_rows, hidden),
        "attn_v": (key_rows, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    for tensor in reader.tensors:
        kind = tensor.name.split(".")[-2]
        if kind.endswith("norm"):
            vector = np.zeros(large.hidden, np.float32)
            vector[: small.hidden] = tensor.data * scale
            writer.add_tensor(tensor.name, vector)
        elif tensor.name.endswith("bias"):
            vector = np.zeros(sides[kind][0][0], np.float32)
            vector[sides[kind][0][1]] = tensor.data if kind == "attn_q" else tensor.data[of_keys]
            writer.add_tensor(tensor.name, vector)
        else:
            if kind in ("attn_k", "attn_v"):
                tensor = tensor._replace(data=tensor.data[of_keys])
            vocabulary = tensor.data.shape[0]
            rows, columns = sides.get(kind, ((vocabulary, list(range(vocabulary))), hidden))
            data = placed(tensor, rows, columns)
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    add_idle_layers(reader, writer, small, large)


def add_idle_layers(
    reader: GGUFReader, writer: gguf.GGUFWriter, small: Shape, large: Shape
) -> None:
    """Adds layers of zeros, which add nothing to the hidden states, after those of the file."""
    widths = {"attn_norm": large.hidden, "ffn_norm": large.hidden}
    first = [tensor for tensor in reader.tensors if tensor.name.startswith("blk.0.")]
    shapes = {
        "attn_q": (large.heads * HEAD, large.hidden),
        "attn_k": (large.groups * HEAD, large.hidden),
        "attn_v": (large.groups * HEAD, large.hidden),
        "attn_output": (large.hidden, large.heads * HEAD),
        "ffn_gate": (large.inner, large.hidden),
        "ffn_up": (large.inner, large.hidden),
        "ffn_down": (large.hidden, large.inner),
    }
    for number in range(small.layers, large.layers):
        for tensor in first:
            kind, what = tensor.name.split(".")[-2:]
            name = f"blk.{number}.{kind}.{what}"
            if kind in widths or what == "bias":
                length = widths.get(kind) or shapes[kind][0]
                writer.add_tensor(name, np.zeros(length, np.float32))
            else:
                block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
                rows, columns = shapes[kind]
                zeros = np.zeros((rows, columns // block * size), np.uint8)
                writer.add_tensor(name, zeros, raw_dtype=tensor.tensor_type)


def copy_values(reader: GGUFReader, writer: gguf.GGUFWriter, small: Shape, large: Shape) -> None:
    changed = {
        "qwen2.embedding_length": large.hidden,
        "qwen2.feed_forward_length": large.inner,
        "qwen2.attention.head_count": large.heads,
        "qwen2.attention.head_count_kv": large.groups,
        "qwen2.block_count": large.layers,
    }
    epsilon = "qwen2.attention.layer_norm_rms_epsilon"
    for name, field in reader.fields.items():
        if not name.startswith(OWN):
            kind, *of_list = field.types
            value = changed.get(name, field.contents())
            if name == epsilon:
                value = field.contents() * small.hidden / large.hidden
            writer.add_key_value(name, value, kind, *of_list[-1:])


def shape_of(reader: GGUFReader) -> Shape:
    names = (
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "block_count",
    )
    return Shape(*(int(reader.fields[f"qwen2.{name}"].contents()) for name in names))


def enlarge_head(before: Path, after: Path, large: Shape) -> None:
    """Writes the ``eagle3`` head of a folder for the enlarged target."""
    about = json.loads((before / "config.json").read_text())
    small = about["target"]["hidden_size"]
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[about["weights_in_blocks"]]]
    about["target"] |= {"hidden_size": large.hidden, "layers": large.layers}
    about["norm_eps"] *= small / large.hidden
    weights = load_file(before / "model.safetensors")
    for name, tensor in weights.items():
        kind = name.split(".")[-2] if "." in name else name
        if kind.endswith("norm"):
            weights[name] = tensor.new_zeros(large.hidden)
            weights[name][:small] = tensor * sqrt(small / large.hidden)
        elif tensor.ndim == 2:
            pieces = HIDDEN_STATES_READ.get(kind)
            rows = len(tensor)
            if pieces is not None:
                old = tensor.view(rows, pieces, -1, size)
                tensor = tensor.new_zeros(rows, pieces, large.hidden // block, size)
                tensor[:, :, : old.shape[2]] = old
            padded = tensor.new_zeros(large.hidden if kind in HIDDEN_STATES_WRITTEN else rows, 1)
            padded = padded.repeat(1, tensor.view(rows, -1).shape[1])
            padded[:rows] = tensor.view(rows, -1)
            weights[name] = padded
    after.mkdir(parents=True, exist_ok=True)
    save_file(weights, after / "model.safetensors")
    (after / "config.json").write_text(json.dumps(about, indent=2))


before, after, large = Path(sys.argv[1]), Path(sys.argv[2]), SHAPES[sys.argv[3]]
if before.is_dir():
    enlarge_head(before, after, large)
    sys.exit()
reader = GGUFReader(before)
writer = gguf.GGUFWriter(after, "qwen2", use_temp_file=True)
small = shape_of(reader)
copy_values(reader, writer, small, large)
enlarged(reader, writer, small, large)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
print(f"{after}: {after.stat().st_size / 1e9:.2f} GB")
