"""Reads a model by a ``device_map``, which says where its parts lie."""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from torch import nn

from outpace.core.values import shown
from outpace.errors import ConfigError, ModelLoadError, UnsupportedModel, did_you_mean, refuse
from outpace.targets.cpu.kernels import EXPLICIT_KERNELS
from outpace.targets.hf.device_map import OUT

AUTO = "auto"

DeviceMap = str | Mapping[str, Any]
"""`AUTO`, or by the name of a part of the model the device that it lies on, "cpu" or "disk"."""


def check_options(
    *,
    device: object,
    quantization: object,
    lora: object,
    cpu_kernels: str,
    compiled: bool,
) -> None:
    """Raises ``ConfigError`` for what does not go with a device map, and where accelerate, which
    it needs, is not installed."""
    reasons = {
        f"device={str(device)!r}": device != AUTO and "that says where all of the model lies",
        "quantization": quantization is not None and "weights may lie where they are not rounded",
        "lora": lora is not None and "weights may lie where none are merged into them",
        f"cpu_kernels={cpu_kernels!r}": (cpu_kernels == "tune" or cpu_kernels in EXPLICIT_KERNELS)
        and "layers of our own stay where they are",
        "compile=True": compiled
        and "passes over several devices are neither compiled nor recorded",
    }
    refuse("device_map", reasons)
    if find_spec("accelerate") is None:
        raise ConfigError(
            "device_map needs accelerate, which is not installed: pip install "
            "'outpace[device-map]'."
        )


def check_config(config: Any) -> None:
    """Raises ``UnsupportedModel`` where the configuration tells that a model is not laid out over
    several devices."""
    if getattr(config, "quantization_config", None):
        raise UnsupportedModel(
            f"a model of type {config.model_type!r} whose weights are quantised is not laid out by "
            f"a device_map: {OUT}, or name a checkpoint in bfloat16."
        )


NO_PLACE = "does not give any device for the following parameters: "
"""What accelerate says of a device map that leaves parts out."""


def read_laid_out(read: Callable[..., nn.Module], device_map: DeviceMap) -> nn.Module:
    """Returns the model that ``read`` reads when it is given transformers' arguments for a device
    map. Weights on the disk stay in the checkpoint's files. Those that these hold in another form
    are written to a folder of the system's temporary files, which goes with the model.

    Raises ``ConfigError`` for a device map that leaves parts out, or names some that there are not.
    """
    folder = tempfile.mkdtemp(prefix="outpace-")
    try:
        with warnings.catch_warnings():  # of parts that there are not, which are refused below
            warnings.filterwarnings("ignore", "The following device_map keys do not match")
            model = read(device_map=device_map, offload_folder=folder)
        _check_parts(model, device_map)
    except ModelLoadError as error:
        shutil.rmtree(folder, ignore_errors=True)
        _, without, parts = str(error.__cause__).partition(NO_PLACE)
        if not without:
            raise
        raise ConfigError(
            f"the device_map does not say where these parts of the model lie: {shown(parts)}. Name "
            "them, or what they are in."
        ) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return model


def _check_parts(model: nn.Module, device_map: DeviceMap) -> None:
    if isinstance(device_map, str):
        return
    known = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    known |= {name for name, _ in model.named_buffers()}
    for part in device_map:
        if part not in known:
            raise ConfigError(
                f"the device_map names {part!r}, and {type(model).__name__} has no such part"
                f"{did_you_mean(part, known)}."
            )
