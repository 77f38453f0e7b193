"""Small trained heads for the tiny Llama. They are recorded too, in the format that users' folders
have, so that their weights do not change with the code that makes dummy heads.

A weight is kept as a whole number of at most eight bits and a power of two for its tensor, hence
exactly, in any dtype.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from .files import RECORDED, read, write
from .inside import dummy_heads
from .models import model

WEIGHTS = "heads.npz"
LARGEST = 127


def record() -> None:
    """Writes a head of each kind."""
    configs: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for method, config, weights in dummy_heads(model("llama")):
        configs[method] = {"config": dict(config), "exponents": {}}
        for name, weight in weights.items():
            if weight.is_floating_point():
                exponent, weight = _rounded(weight)
                configs[method]["exponents"][name] = exponent
            arrays[f"{method}/{name}"] = weight.numpy()
    write("heads", configs)
    np.savez_compressed(RECORDED / WEIGHTS, **arrays)


def names() -> list[str]:
    """Returns the methods of which a head is recorded."""
    return list(read("heads"))


def folder(method: str, place: Path) -> str:
    """Writes the recorded head of a method into a folder, as a user has it; returns its path."""
    recorded = read("heads")[method]
    path = place / method
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(recorded["config"]), encoding="utf-8")
    save_file(_weights(method, recorded["exponents"]), path / "model.safetensors")
    return str(path)


def _rounded(weight: Tensor) -> tuple[int, Tensor]:
    """Returns an exponent, and the whole numbers that make the weight when times two to it."""
    most = float(weight.abs().max())
    exponent = math.ceil(math.log2(most / LARGEST)) if most else 0
    return exponent, (weight / 2.0**exponent).round().to(torch.int8)


def _weights(method: str, exponents: Mapping[str, int]) -> dict[str, Tensor]:
    found = {}
    with np.load(RECORDED / WEIGHTS) as arrays:
        for full in arrays.files:
            kind, _, name = full.partition("/")
            if kind == method:
                weight = torch.from_numpy(arrays[full])
                wide = name in exponents
                found[name] = weight.double() * 2.0 ** exponents[name] if wide else weight
    return found
