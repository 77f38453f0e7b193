"""Converts a causal LM of transformers to OpenVINO IR in the form that OpenVINO GenAI loads.

optimum-intel does this too, for older releases of transformers. The graph keeps its cache in
variables and has four inputs: input_ids, attention_mask, position_ids, beam_idx.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from outpace.bench.peers.openvino import INSTALL
from outpace.core.extras import extra
from outpace.targets.hf.gguf.load import read_dequantized, read_gguf_tokenizer
from outpace.targets.hf.loading.source import locate, names_gguf


class _Past:
    """A cache that concatenates keys and values, which a tracer can follow."""

    def __init__(self, flat: tuple[Tensor, ...]) -> None:
        self.flat = list(flat)

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kw: Any) -> Any:
        joined = (
            torch.cat([self.flat[2 * layer], keys], 2),
            torch.cat([self.flat[2 * layer + 1], values], 2),
        )
        self.flat[2 * layer : 2 * layer + 2] = joined
        return joined

    def get_seq_length(self, layer: int = 0) -> int:
        return self.flat[0].shape[2]


class _Traceable(nn.Module):
    """The model as a function from tensors to tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        cache = _Past(past)
        total, columns = attention_mask.shape[1], input_ids.shape[1]
        slot = torch.arange(total)
        reach = torch.arange(columns) + (total - columns)
        seen = (slot[None, :] <= reach[:, None])[None, None] & attention_mask.bool()[:, None, None]
        output = self.model(
            input_ids=input_ids,
            attention_mask=seen,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return (output.logits, *cache.flat)


def _read(path: str) -> tuple[Any, Any]:
    """Returns a model with its weights as numbers in float32, and its tokenizer."""
    if names_gguf(path):
        file = locate(path)
        return read_dequantized(file), read_gguf_tokenizer(file)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model, transformers.AutoTokenizer.from_pretrained(path)


def save_ir(model_path: str, out: Path) -> None:
    """Writes ``openvino_model.xml`` and its weights, uncompressed in float32. model_path: a folder,
    a name on the hub or a GGUF file."""
    ov = extra("openvino", "the OpenVINO peer", INSTALL)
    model, tokenizer = _read(model_path)
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    heads = config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    past = tuple(torch.zeros(1, heads, 3, size) for _ in range(2 * layers))
    example = (
        torch.ones(1, 2, dtype=torch.long),
        torch.ones(1, 5, dtype=torch.long),
        torch.tensor([[3, 4]]),
        *past,
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer warns of branches that never change
        graph = ov.convert_model(_Traceable(model.eval()), example_input=example)
    names = _name_ports(ov, graph, layers, heads, size)
    _remember(graph, names)
    out.mkdir(parents=True, exist_ok=True)
    ov.save_model(graph, out / "openvino_model.xml", compress_to_fp16=False)
    model.config.save_pretrained(out)
    _save_tokenizer(ov, tokenizer, out)


GROUP = 128
"""Inputs that share a scale in 4 bits, as OpenVINO's own tools take them by default."""


def save_quantised(plain: Path, out: Path, kind: str) -> None:
    """Writes an IR with quantised weights; ``kind`` is "int8" or "int4".

    int8 is as outpace has it: symmetric, a scale per output. int4 is symmetric with a scale per
    output and group of inputs, and 8 bits in the head and in layers whose inputs do not make whole
    groups, as OpenVINO's own tools do it.
    """
    ov = extra("openvino", "the OpenVINO peer", INSTALL)
    graph = ov.Core().read_model(plain / "openvino_model.xml")
    vocabulary = graph.output("logits").get_partial_shape()[2].get_length()
    for node in graph.get_ops():
        if node.get_type_name() != "MatMul":
            continue
        weight = node.input_value(1).get_node()
        if weight.get_type_name() != "Constant" or len(weight.data.shape) != 2:
            continue
        axis = 1 if node.get_attributes()["transpose_b"] else 0  # the dimension of the inputs
        inputs, outputs = weight.data.shape[axis], weight.data.shape[1 - axis]
        narrow = kind == "int4" and axis == 1 and inputs % GROUP == 0 and outputs != vocabulary
        made = four_bits(weight.data) if narrow else _eight_bits(weight.data, axis)
        node.input(1).replace_source_output(made.output(0))
    shutil.copytree(plain, out, dirs_exist_ok=True)
    ov.save_model(graph, out / "openvino_model.xml", compress_to_fp16=False)


def _eight_bits(weight: Any, axis: int) -> Any:
    """Returns the node of a weight in int8 times a scale for each output. axis: of the inputs."""
    ops = extra("openvino.opset13", "the OpenVINO peer", INSTALL)
    scale = np.maximum(np.abs(weight).max(axis, keepdims=True), 1e-30) / 127
    integers = np.rint(weight / scale).astype(np.int8)
    wide = ops.convert(ops.constant(integers), "f32")
    return ops.multiply(wide, ops.constant(scale.astype(np.float32)))


def four_bits(weight: Any) -> Any:
    """Returns the node of a weight [outputs, inputs] in int4 times a scale for each group."""
    ov = extra("openvino", "the OpenVINO peer", INSTALL)
    ops = extra("openvino.opset13", "the OpenVINO peer", INSTALL)
    groups = weight.reshape(len(weight), -1, GROUP)
    scale = np.maximum(np.abs(groups).max(2, keepdims=True), 1e-30) / 7
    integers = np.clip(np.rint(groups / scale), -8, 7).astype(np.int8)
    pairs = integers.reshape(-1, 2) & 15  # two numbers a byte, the first in the lower half
    packed = (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8)
    constant = ops.constant(ov.Tensor(packed, list(groups.shape), ov.Type.i4))
    wide = ops.convert(constant, "f32")
    scaled = ops.multiply(wide, ops.constant(scale.astype(np.float32)))
    return ops.reshape(scaled, ops.constant(np.array(weight.shape, dtype=np.int64)), False)


def _save_tokenizer(ov: Any, tokenizer: Any, out: Path) -> None:
    """Writes the tokenizer's graphs, without which a pipeline with a drafter does not load."""
    tokenizers = extra("openvino_tokenizers", "the OpenVINO peer", INSTALL)
    reading, writing = tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
    ov.save_model(reading, out / "openvino_tokenizer.xml")
    ov.save_model(writing, out / "openvino_detokenizer.xml")


def _name_ports(ov: Any, graph: Any, layers: int, heads: int, size: int) -> dict[str, str]:
    """Names the graph's ports and leaves their shapes open.

    Returns, for each input of the cache, the output that takes its place in the next call.
    """
    pairs = {
        f"past_key_values.{layer}.{what}": f"present.{layer}.{what}"
        for layer in range(layers)
        for what in ("key", "value")
    }
    plain = ("input_ids", "attention_mask", "position_ids")
    for port, name in zip(graph.inputs, [*plain, *pairs], strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
        shape = [-1, -1] if name in plain else [-1, heads, -1, size]
        port.get_node().set_partial_shape(ov.PartialShape(shape))
    for port, name in zip(graph.outputs, ["logits", *pairs.values()], strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    return pairs


def _remember(graph: Any, pairs: dict[str, str]) -> None:
    """Turns the cache's inputs and outputs into variables that begin empty."""
    ops = extra("openvino.opset13", "the OpenVINO peer", INSTALL)
    offline = extra("openvino._offline_transformations", "the OpenVINO peer", INSTALL)
    ov = extra("openvino", "the OpenVINO peer", INSTALL)
    beam = ops.parameter([-1], ov.Type.i32, name="beam_idx")
    beam.output(0).get_tensor().add_names({"beam_idx"})
    graph.add_parameters([beam])
    for name in pairs:
        port = graph.input(name)
        users = port.get_target_inputs()
        chosen = ops.gather(port, beam, ops.constant(0))
        for user in users:
            user.replace_source_output(chosen.output(0))
    graph.validate_nodes_and_infer_types()
    offline.apply_make_stateful_transformation(graph, pairs)
    ids = ops.shape_of(graph.input("input_ids"), output_type="i64")
    batch = ops.gather(ids, ops.constant([0]), ops.constant(0))
    for node in graph.get_ops():
        if node.get_type_name() != "ReadValue":
            continue
        shape = node.get_output_partial_shape(0)
        dims = [batch, *(ops.constant(np.array([d.min_length])) for d in list(shape)[1:])]
        zero = ops.constant(0.0, dtype=node.get_output_element_type(0))
        node.set_arguments([ops.broadcast(zero, ops.concat(dims, axis=0))])
    graph.validate_nodes_and_infer_types()
