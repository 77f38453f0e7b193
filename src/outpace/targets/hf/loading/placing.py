"""The choice of a model's device and dtype."""

from __future__ import annotations

import torch

from outpace.core.values import shown
from outpace.errors import ConfigError
from outpace.targets.hf.device_map import DISK
from outpace.targets.hf.loading.device_map import DeviceMap

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def named_device(device: str | torch.device) -> torch.device:
    """Returns the device of a name, whether or not it exists here; ``ConfigError`` for what is no
    name of a device."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"unknown device {shown(device)}: use 'auto', 'cpu' or 'cuda'."
        ) from error


def pick_device(device: str | torch.device) -> torch.device:
    """Returns the device to load a model on; ``ConfigError`` if torch does not compute there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = named_device(device)
    if chosen.type not in ("cpu", "cuda"):
        _check_computes(chosen)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device: use 'cpu'.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {str(device)!r} was asked for, but torch sees {torch.cuda.device_count()} "
            "CUDA device(s), counted from 0."
        )
    return chosen


def pick_places(device_map: DeviceMap) -> tuple[torch.device, DeviceMap]:
    """Returns the device that computes parts on the disk, and those in memory next to a GPU (the
    first GPU that is named, else the CPU), and a device map as accelerate takes it; ``ConfigError``
    as `pick_device`."""
    if isinstance(device_map, str):
        return pick_device("auto"), device_map
    where = torch.device("cpu")
    found: dict[str, int | str] = {}
    for part, given in device_map.items():
        if given == DISK:
            found[part] = DISK
            continue
        device = pick_device(f"cuda:{given}" if type(given) is int else given)
        found[part] = (device.index or 0) if device.type == "cuda" else str(device)
        where = device if where.type == "cpu" else where
    return where, found


def _check_computes(device: torch.device) -> None:
    """Raises ``ConfigError`` for a kind of device on which torch computes nothing here."""
    try:
        torch.zeros(1, device=device).tolist()
    except Exception as error:  # each kind of device raises another one
        raise ConfigError(
            f"torch does not compute on the device {str(device)!r} here: use 'auto', 'cpu' or "
            "'cuda'."
        ) from error


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """Returns the dtype to load weights in ("auto" is left to the checkpoint on a GPU)."""
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {shown(dtype)}: choose from auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]
