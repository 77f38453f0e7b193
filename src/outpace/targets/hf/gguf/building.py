"""A model of transformers around the weights of a GGUF file.

The model is built without memory for its weights, then gets them: linear layers and embeddings
whose weights are in blocks are replaced by ones that keep them so.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from outpace.errors import ModelLoadError
from outpace.targets.cpu.weights.blocks import KINDS, BlockEmbedding, BlockLinear, Blocks
from outpace.targets.cpu.weights.experts import STACKED, BlockExperts, is_experts
from outpace.targets.cpu.weights.latents import BlockLatents
from outpace.targets.cpu.weights.weight import BLOCK_PANEL
from outpace.targets.hf.attention import use_grouped
from outpace.targets.hf.gguf.file import GGUFModel
from outpace.targets.hf.gguf.names import map_tensors

Weights = dict[str, Blocks | Tensor]


def empty_model(config: Any, dtype: torch.dtype, attention: str | None) -> nn.Module:
    """Returns a model without storage."""
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"), no_init_weights():
        built = make(config, dtype=dtype, attn_implementation=attention)
    built.tie_weights()
    return built  # type: ignore[no-any-return]


@torch.no_grad()
def filled(
    model: GGUFModel,
    built: nn.Module,
    dtype: torch.dtype,
    packed: bool,
    changed: Collection[str] = (),
) -> nn.Module:
    """Returns a model that was built without storage, with the weights of a file.

    dtype: of weights that are in no blocks. packed: whether weights stay in blocks where they can;
    else all are dequantised. changed: names of weights that will be changed, and are dequantised.
    Raises ``ModelLoadError`` or ``UnsupportedModel`` where file and model do not fit.
    """
    if packed:
        _hold_experts(model, built, changed)
        _hold_latents(model, built, changed)
    mapping = map_tensors(model, built)
    packable = _packable(built) if packed else {}
    places = dict(built.named_parameters(remove_duplicate=False))  # a tied head is there twice
    dequantized = {id(places[name]) for name in changed if name in places}
    packable = {n: turned for n, turned in packable.items() if id(places[n]) not in dequantized}
    weights: Weights = {
        name: weight.to(dtype) if isinstance(weight, Tensor) else weight
        for name, weight in mapping.weights(model, packable)
    }
    _check(model, built, weights, mapping.lacking(model))
    _make_buffers(built)
    _replace_layers(built, weights, dtype)
    buffers = dict(built.named_buffers())
    numbers = {
        name: weight if name in buffers else nn.Parameter(weight, requires_grad=False)
        for name, weight in weights.items()
        if isinstance(weight, Tensor)
    }
    built.load_state_dict(numbers, strict=False, assign=True)
    built.tie_weights()  # type: ignore[operator]
    _shape_rotary(model, built)
    return built.eval()


OF_EXPERTS = ("gate", "up", "down")
"""Parts of experts, as tensors are called."""


def _hold_experts(model: GGUFModel, built: nn.Module, changed: Collection[str]) -> None:
    """Puts layers in the place of those experts of a model that are in blocks in the file."""
    for name, module in list(built.named_modules()):
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer is None or not is_experts(module) or not _fit_in_blocks(module):
            continue
        tensors = [model.tensors.get(f"blk.{layer[1]}.ffn_{p}_exps.weight") for p in OF_EXPERTS]
        count = len(module.down_proj)
        kept = (each and each.kind in KINDS and (*each.shape, 0)[0] == count for each in tensors)
        if all(kept) and not any(f"{name}.{own}" in changed for own in STACKED):
            built.set_submodule(name, BlockExperts(module))


OF_LATENTS = ("k", "v")
"""Tensors that make keys and values of latents, as they are called."""


def _hold_latents(model: GGUFModel, built: nn.Module, changed: Collection[str]) -> None:
    """Puts layers in the place of those that make keys and values of latents, where these are two
    in the file, in blocks."""
    for name, module in list(built.named_modules()):
        layer, both = re.search(r"\.layers\.(\d+)\.", name), f"{name}.kv_b_proj"
        if layer is None or not hasattr(module, "kv_b_proj") or f"{both}.weight" in changed:
            continue
        tensors = [model.tensors.get(f"blk.{layer[1]}.attn_{p}_b.weight") for p in OF_LATENTS]
        if all(each is not None and each.kind in KINDS for each in tensors):
            built.set_submodule(both, BlockLatents(module))


def _fit_in_blocks(experts: Any) -> bool:
    """Whether the outputs of experts fill panels."""
    return all(size % BLOCK_PANEL == 0 for size in experts.down_proj.shape[1:])


def _packable(built: nn.Module) -> dict[str, bool]:
    """Returns the names of weights that a layer can keep in blocks, and whether transformers' own
    layer holds them turned, ``[K, N]``."""
    return {
        f"{name}.weight": type(module) is Conv1D
        for name, module in built.named_modules()
        if type(module) in (nn.Linear, Conv1D) or _looks_up(module)
    }


def _looks_up(module: nn.Module) -> bool:
    """Whether a module is an embedding, maybe one that scales what it looks up."""
    return type(module) is nn.Embedding or hasattr(module, "scalar_embed_scale")


def _check(model: GGUFModel, built: nn.Module, weights: Weights, lacking: list[str]) -> None:
    """Raises unless there is every weight of the model, in its shape.

    lacking: tensors without which some of the weights are there in part.
    """
    kept = built.state_dict()
    expected = {name for name, _ in built.named_parameters()}  # a tied head is in it once
    expected |= {name for name, _ in built.named_buffers() if name in kept}
    missing = sorted(expected - weights.keys()) + lacking
    if missing:
        raise ModelLoadError(
            f"{model.path} lacks {len(missing)} of the weights that a model of its architecture "
            f"has ({missing[0]!r} is one): download it again."
        )
    for name, weight in weights.items():
        module = built.get_submodule(name.rpartition(".")[0])
        wanted = tuple(kept[name].shape)
        shape: tuple[int, ...]
        if isinstance(weight, Blocks):
            shape = (weight.outputs, weight.inputs)
            shape = shape[::-1] if type(module) is Conv1D else shape
        else:
            shape = tuple(weight.shape)
        if shape != wanted:
            raise ModelLoadError(
                f"the weight {name!r} in {model.path} has the shape {shape}, and what the file "
                f"says of its model calls for {wanted}: download it again."
            )


def _replace_layers(built: nn.Module, weights: Weights, dtype: torch.dtype) -> None:
    """Puts layers that hold blocks where there are blocks."""
    head = _tied_head(built, weights)
    for name, weight in weights.items():
        if isinstance(weight, Blocks):
            _place_blocks(built, name.removesuffix(".weight"), weight, weights, dtype)
    if head is not None:
        built.set_submodule(*head)
        whole: Any = built
        whole.config.tie_word_embeddings = False  # to transformers they are two layers now


def _tied_head(built: nn.Module, weights: Weights) -> tuple[str, nn.Module] | None:
    """Returns name and layer of a head that shares the blocks of the embedding, None if the head
    is another one."""
    whole: Any = built
    head, table = whole.get_output_embeddings(), whole.get_input_embeddings()
    names = {id(module): name for name, module in built.named_modules()}
    blocks = weights.get(f"{names[id(table)]}.weight")
    if f"{names[id(head)]}.weight" in weights or not isinstance(blocks, Blocks):
        return None
    return names[id(head)], BlockLinear(blocks)


def _place_blocks(
    built: nn.Module, name: str, blocks: Blocks, weights: Weights, dtype: torch.dtype
) -> None:
    module: Any = built.get_submodule(name)
    if isinstance(module, nn.Embedding):
        scale = float(getattr(module, "scalar_embed_scale", 1.0))
        built.set_submodule(name, BlockEmbedding(blocks, dtype, scale))
        return
    bias = weights.get(f"{name}.bias")
    assert bias is None or isinstance(bias, Tensor)
    built.set_submodule(name, BlockLinear(blocks, bias))


def _make_buffers(built: nn.Module) -> None:
    """Computes the buffers that no file holds, such as rotary frequencies, as transformers does.

    The weights have no storage yet: some models look at them while they compute buffers, and
    weights in blocks would be dequantised for each look.
    """
    for weight in built.state_dict(keep_vars=True).values():
        weight._is_hf_initialized = True  # and so is left alone
    for module in built.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                module.register_buffer(name, torch.zeros_like(buffer, device="cpu"), False)
    built.initialize_weights()  # type: ignore[operator]


def _shape_rotary(model: GGUFModel, built: nn.Module) -> None:
    """Divides the rotary frequencies by the factors of the file: Llama 3's, for long texts."""
    factors = model.tensors.get("rope_freqs.weight")
    if factors is None or model.architecture == "gemma4":  # its configuration says them
        return
    numbers = torch.from_numpy(factors.raw.numpy().view("<f4").copy())
    turning: list[Any] = [module for module in built.modules() if hasattr(module, "inv_freq")]
    if not turning:
        raise model.unread(
            f"holds rotary factors (rope_freqs), for which transformers' {type(built).__name__} "
            "has no place"
        )
    for rotary in turning:
        if factors.kind != "F32" or numbers.shape != rotary.inv_freq.shape:
            raise ModelLoadError(
                f"{model.path} holds rotary factors (rope_freqs) of another number than its heads "
                "have frequencies: download it again."
            )
        for buffer in rotary.buffers(recurse=False):  # the frequencies, and a copy of them
            buffer.div_(numbers)


# -- a small model of the same kind, on which to try how drafts are scored -------------------------


SMALL = {
    "vocab_size": 64,
    "intermediate_size": 64,
    "ffn_hidden_size": 64,
    "n_inner": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_dense_layers": 1,
    "shared_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""What is made smaller, where a configuration has it."""


def tiny_model_of(config: Any, dtype: torch.dtype, attention: str | None) -> nn.Module:
    """Returns a small random model of the kind that a configuration describes."""
    make: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small: nn.Module = make(small_config(config), dtype=dtype, attn_implementation=attention)
    use_grouped(small)
    return small.eval()


def small_config(config: Any) -> Any:
    """Returns a configuration of the same kind with few heads, layers and tokens."""
    known: dict[str, Any] = config.to_dict()
    heads = getattr(config, "num_attention_heads", None)
    changes: dict[str, Any] = {name: value for name, value in SMALL.items() if known.get(name)}
    changes["num_hidden_layers"] = 2
    if heads is not None:
        keys = known.get("num_key_value_heads") or heads
        each = heads // keys
        changes["num_attention_heads"] = each
        size, left = divmod(config.hidden_size, heads)
        # Where heads do not divide it (GLM 4.7 Flash), they have sizes of their own, and products
        # of experts take whole 16 bytes.
        changes["hidden_size"] = -(-each * size // 16) * 16 if left else each * size
    if known.get("mamba_n_heads"):  # as many as fill its inputs, of the same size where that is one
        inner = known["mamba_expand"] * changes["hidden_size"]
        changes["mamba_n_heads"] = max(known["mamba_n_groups"], inner // known["mamba_d_head"])
        changes["mamba_d_head"] = inner // changes["mamba_n_heads"]
    if "num_key_value_heads" in known:
        changes["num_key_value_heads"] = 1
    before = known.get("layer_types") or ()
    types = list(dict.fromkeys(before))
    if types:
        if known.get("num_kv_shared_layers"):
            changes["num_kv_shared_layers"] = len(types)
            types *= 2
        types = types if len(types) > 1 else types * 2
        if known.get("per_layer_config"):
            own_of = {before[int(n)]: more for n, more in known["per_layer_config"].items()}
            changes["per_layer_config"] = {
                str(n): {**own_of[kind], "num_key_value_heads": 1}
                for n, kind in enumerate(types)
                if kind in own_of
            }
        changes |= {"layer_types": types, "num_hidden_layers": len(types)}
    own = {theirs: ours for theirs, ours in config.attribute_map.items() if theirs in changes}
    named = {own.get(name, name): value for name, value in changes.items()}
    return AutoConfig.for_model(**{**known, **named})
