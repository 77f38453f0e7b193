"""A head's folder: ``config.json``, which says what it is, and ``model.safetensors``."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.base import StepHead, TargetShape, config_of
from outpace.heads.registry import find_head, head_names

CONFIG, WEIGHTS = "config.json", "model.safetensors"
KIND = "outpace_head"
"""The entry of the configuration that holds the kind of head."""


def save_head(head: StepHead, folder: str | os.PathLike[str]) -> None:
    """Writes a head; a reader finds either the old files or the new ones, never half of them."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    about = {KIND: head.kind, **head.config.as_dict(), "target": asdict(head.target)}
    weights = {name: value.detach().contiguous() for name, value in head.state_dict().items()}
    save_file(weights, path / f"{WEIGHTS}.part")
    (path / f"{CONFIG}.part").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    for name in (WEIGHTS, CONFIG):
        (path / f"{name}.part").replace(path / name)


def load_head(folder: str | os.PathLike[str]) -> StepHead:
    """Returns the head in a folder. Raises ``ModelLoadError`` with the cause and the remedy."""
    path = Path(folder)
    head = _built(path, _read_config(path))
    file = path / WEIGHTS
    try:
        head.load_state_dict(load_file(file))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} has no {WEIGHTS}: train or copy the head again.") from error
    except (SafetensorError, RuntimeError, OSError) as error:
        raise ModelLoadError(
            f"the weights in {file} are damaged, or not those that {CONFIG} describes "
            f"({_first_line(error)}): train or copy the head again."
        ) from error
    return head.eval().requires_grad_(False)


def check_fits(head: StepHead, target: TargetShape, what: str) -> None:
    """Raises ``ConfigError`` where a head was made for a target of another shape."""
    for name in ("hidden_size", "vocab_size", "layers"):
        made_for, here = getattr(head.target, name), getattr(target, name)
        if made_for != here:
            raise ConfigError(
                f"{what} was trained for another model ({head.target.name or 'unnamed'}): its "
                f"{name} is {made_for}, and this target's is {here}; train one for this target."
            )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ModelLoadError(f"there is no folder {str(path)!r} with a trained head.")
    try:
        about = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(
            f"{path} has no {CONFIG}: name a folder that 'outpace train' wrote."
        ) from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"cannot read {path / CONFIG} ({_first_line(error)}): train or copy the head again."
        ) from error
    if not isinstance(about, dict) or about.get(KIND) not in head_names():
        raise ModelLoadError(
            f"{path} holds no trained head: its {CONFIG} has no {KIND!r} of {head_names()}."
        )
    return about


def _built(path: Path, about: dict[str, Any]) -> StepHead:
    kind = find_head(about.pop(KIND))
    try:
        target = TargetShape(**about.pop("target"))
        return kind(target, config_of(kind.Config, about))
    except (TypeError, ValueError, KeyError) as error:
        raise ModelLoadError(
            f"{path / CONFIG} does not describe a {kind.kind} head ({_first_line(error)}): train "
            "or copy the head again."
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
