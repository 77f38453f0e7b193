"""Fingerprints of models: what distinguishes one from others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outpace.targets.hf.device_map import onload_weights
from outpace.targets.hf.loading.loaded import LoadedModel


@dataclass(frozen=True)
class Fingerprint:
    """Enough of a model to tell it from others, whatever its folder is called and however its
    matrices are rounded."""

    name: str
    kind: str
    layers: int
    hidden_size: int
    weights: str
    """`digest_of` its weights."""

    @classmethod
    def of(cls, loaded: LoadedModel) -> Fingerprint:
        """Returns the fingerprint of a model."""
        config = loaded.config
        return cls(
            name=Path(str(loaded.name)).name,
            kind=str(config.model_type),
            layers=int(config.num_hidden_layers),
            hidden_size=int(config.hidden_size),
            weights=digest_of(loaded.model),
        )

    def same_model(self, other: Fingerprint) -> bool:
        """Whether both are of one model: its name may differ."""
        parts = ("kind", "layers", "hidden_size", "weights")
        return all(getattr(self, part) == getattr(other, part) for part in parts)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.layers} layers of {self.hidden_size})"


SAMPLED = 1024
"""Numbers that are looked at of each tensor, of a network without norms."""


def digest_of(model: torch.nn.Module) -> str:
    """Returns a short text that other models hardly ever have: of the norms' weights, which no
    quantisation touches. Of a network without any, such as Medusa's, it is that of some numbers of
    each tensor."""
    found, normed = hashlib.sha256(), False
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and (name.endswith("weight") or "norm" in name.lower()):
            normed = True
            module, _, own = name.rpartition(".")
            with onload_weights(model.get_submodule(module)):
                # In the narrowest type that models come in, so that it is the same in all.
                here: Any = getattr(model.get_submodule(module), own).detach()
                here = here.to_local() if hasattr(here, "to_local") else here  # each process's
                found.update(here.cpu().bfloat16().view(torch.int16).numpy().tobytes())
    for tensor in [] if normed else model.state_dict().values():
        if type(tensor) is not torch.Tensor:
            continue  # torchao's rounded weights cannot be looked at in part
        some = tensor.detach().flatten()[:: max(1, tensor.numel() // SAMPLED)]
        found.update(str(some.cpu().bfloat16().tolist()).encode())
    return found.hexdigest()[:16]
