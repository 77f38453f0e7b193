"""Models of which parts lie on several devices, in the memory of the CPU or on the disk.

transformers reads such a model by a ``device_map`` (`loading.device_map`). accelerate's hooks then
bring what a part is given to the device that computes it, and the weights of a part that lies
elsewhere, too. Keys and values lie where their layer is computed (`slot_layer.SlotLayer`); tokens,
logits and hidden states are where the first part of the model is: the embeddings, or a vision
tower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from outpace.errors import UnsupportedModel

DISK = "disk"
OUT = "leave device_map out"


def is_multi_device(model: nn.Module) -> bool:
    """Returns whether accelerate's hooks move what parts of a model are given, or their weights."""
    places = set(getattr(model, "hf_device_map", {}).values())
    return len(places) > 1 or DISK in places


def places(model: nn.Module) -> str | None:
    """Returns where the parts of a model lie, in words; None for one that lies on one device."""
    if not is_multi_device(model):
        return None
    loaded: Any = model
    found = dict.fromkeys(
        f"cuda:{place}" if isinstance(place, int) else str(place)
        for place in loaded.hf_device_map.values()
    )
    *others, last = found
    return f"{', '.join(others)} and {last}" if others else last


@contextmanager
def onload_weights(module: nn.Module) -> Iterator[None]:
    """Has the weights of a module itself in memory while the block runs, wherever they lie."""
    if not hasattr(module, "_hf_hook"):
        yield
        return
    from accelerate.utils import align_module_device

    with align_module_device(module):
        yield


def check(model: nn.Module, reason: str | None) -> None:
    """Raises ``UnsupportedModel`` for a model on several devices whose embeddings are not where
    they are computed, or which cannot be on several for the given reason."""
    if reason is not None:
        raise UnsupportedModel(
            f"{type(model).__name__} {reason}, and is not decoded with a device_map: {OUT}."
        )
    loaded: Any = model
    if loaded.device.type == "meta":
        name = next(name for name, _ in loaded.named_parameters()).rpartition(".")[0]
        raise UnsupportedModel(
            f"{name} of {type(model).__name__} lies on the disk, or in memory next to a GPU, and "
            "inputs are brought to where it lies: name the device that computes for it in the "
            "device_map."
        )
