"""Where a model runs, and in which numbers."""

from __future__ import annotations

import torch

from outpace.core.values import shown
from outpace.errors import ConfigError

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def pick_device(device: str | torch.device) -> torch.device:
    """Returns the device; ``ConfigError`` if it does not exist here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"unknown device {shown(device)}: use 'auto', 'cpu' or 'cuda'."
        ) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device: use 'cpu'.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {str(device)!r} was asked for, but torch sees {torch.cuda.device_count()} "
            "CUDA device(s), counted from 0."
        )
    return chosen


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """Returns the dtype to load weights in ("auto" is left to the checkpoint on a GPU)."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {shown(dtype)}: choose from auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]
