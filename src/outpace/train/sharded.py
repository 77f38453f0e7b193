"""A target whose weights are split over the processes that train together (FSDP).

Each process holds its part of every decoder layer. Before a layer computes, they send each other
their parts of it, and behind it they let go of them again (torch's `fully_shard`), so that a
process holds a layer or two at once and not the whole target, which one GPU may be too small for.
What drafters use beside the target's passes stays whole in each process, which is little of a large
model: the embedding table and the output matrix.

So all processes have to make the same number of passes, each over whatever text it has: one that
made a pass more would wait for the others for ever.

Tested with two processes that share a CPU (gloo). It has not been run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from outpace.core.progress import Progress
from outpace.errors import UnsupportedModel
from outpace.targets.hf.loading.load import load_plain, pick_device
from outpace.targets.hf.loading.loaded import Loaded
from outpace.targets.hf.partial.layers import decoder_layers
from outpace.train.ranks import Ranks


def load_sharded(
    name: str,
    ranks: Ranks,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    progress: Progress,
) -> Loaded:
    """Returns a target of which this process holds a part, to be read and never changed. All ranks
    call it, while they are `joined`.

    name: of a folder, or on the hub. Its files are mapped to memory, and on a GPU a layer at a time
    is put there before it is split. Raises ``UnsupportedModel`` for one that cannot be split.
    """
    loaded = load_plain(
        name,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    progress("splitting the weights", 0.5)
    _shard(loaded, pick_device(device), ranks.count)
    progress("loaded", 1.0)
    return loaded


def is_sharded(loaded: Loaded) -> bool:
    """Returns whether this process holds a part of the model only."""
    return isinstance(loaded.model, FSDPModule)


def _shard(loaded: Loaded, device: torch.device, count: int) -> None:
    """Splits a model whose weights are on the CPU over n processes, and puts this one's part
    on its device."""
    model, layers = loaded.model, decoder_layers(loaded.model)
    _check(loaded, layers)
    model.requires_grad_(False)
    whole = _used_alone(model)
    for weight in whole:
        weight.data = weight.data.to(device)
    mesh = init_device_mesh(device.type, (count,))
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    model.register_forward_hook(_forget)


def _check(loaded: Loaded, layers: list[nn.Module]) -> None:
    """Raises ``UnsupportedModel`` for layers that cannot be split."""
    weights = [weight for layer in layers for weight in layer.parameters()]
    if len({*weights}) < len(weights):
        raise UnsupportedModel(
            f"layers of {loaded.name} share their weights, and only layers with weights of their "
            "own can be split: leave --shard-target out."
        )
    plain = (type(weight.data) is Tensor and weight.is_floating_point() for weight in weights)
    if loaded.packed or not all(plain):
        raise UnsupportedModel(
            f"the weights of {loaded.name} are quantised, and only plain numbers can be split: "
            "name the model as it was before, or leave --shard-target out."
        )


def _used_alone(model: nn.Module) -> set[nn.Parameter]:
    """The weights that are used beside the model's passes, and those that have no rows to split."""
    loaded: Any = model
    parts = [loaded.get_input_embeddings(), loaded.get_output_embeddings()]
    found = {weight for part in parts if part is not None for weight in part.parameters()}
    return found | {weight for weight in model.parameters() if weight.dim() == 0}


def _forget(model: nn.Module, given: Any, output: Any) -> None:
    """Drops what FSDP notes of a pass for a way back that does not come: the notes of all passes
    would add up, by some kilobytes each. Some versions of torch have no method for that."""
    forget = getattr(model, "reset_iter_state", None)
    if forget is not None and not torch.is_grad_enabled():
        forget()
