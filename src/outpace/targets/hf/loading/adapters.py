"""Adapters (LoRA and its kin) in the place of a model, or in one folder with it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from outpace.core.values import shown
from outpace.errors import ModelLoadError

ADAPTER = "adapter_config.json"
"""The file that describes an adapter, as peft saves it."""

_WEIGHTS = "adapter_model"
"""How the names of the files with an adapter's own weights begin."""

_MERGED = (
    "merge the two (peft's merge_and_unload, then save_pretrained) and name the merged model's "
    "folder"
)


def check_no_adapter(name: str, files: Iterable[str], folder: Path | None = None) -> None:
    """Raises ``ModelLoadError`` where the files of a model are those of an adapter, or an adapter
    is among them: transformers would apply it where peft is installed and ignore it elsewhere.

    name: what the caller calls the model. folder: where the files are, if they are on this machine.
    """
    names = set(files)
    if ADAPTER not in names:
        return
    kind, base = _described(None if folder is None else folder / ADAPTER)
    if "config.json" in names and any(map(_is_of_a_model, names)):
        raise ModelLoadError(
            f"{name!r} holds a model and {kind} ({ADAPTER}), and does not say which of their two "
            f"texts is wanted: {_MERGED}, or move {ADAPTER} elsewhere for the model without it."
        )
    raise ModelLoadError(f"{name!r} holds {kind} for {base}, and no model: {_MERGED}.")


def _is_of_a_model(file: str) -> bool:
    """Whether a file holds weights that are not an adapter's."""
    return file.endswith((".safetensors", ".bin")) and not file.startswith(_WEIGHTS)


def _described(file: Path | None) -> tuple[str, str]:
    """What an adapter is and what it was made for, as far as its file says that."""
    about: Any = {}
    if file is not None:
        with suppress(OSError, ValueError):  # it is an adapter's whatever it says
            about = json.loads(file.read_text(encoding="utf-8"))
    entries = about if isinstance(about, dict) else {}
    kind, base = entries.get("peft_type"), entries.get("base_model_name_or_path")
    lora = kind == "LORA" or not isinstance(kind, str)
    return (
        "a LoRA adapter" if lora else f"an adapter of the kind {shown(kind)}",
        f"the model {shown(base)}" if isinstance(base, str) and base else "another model",
    )
