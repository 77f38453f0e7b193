"""A folder with a head: ``config.json``, which says what it is, and a file with weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outpace.errors import ModelLoadError

CONFIG = "config.json"

Network = TypeVar("Network", bound=nn.Module)


class Folder:
    """Where a head is, or will be."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_config(self) -> dict[str, Any]:
        """Returns the configuration; ``ModelLoadError`` where there is none."""
        if not self.path.is_dir():
            raise ModelLoadError(f"there is no folder {str(self.path)!r} with a trained head.")
        file = self.path / CONFIG
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelLoadError(
                f"{self.path} has no {CONFIG}: name a folder that 'outpace train' wrote."
            ) from error
        except (OSError, ValueError) as error:
            raise ModelLoadError(
                f"cannot read {file} ({first_line(error)}): train or copy the head again."
            ) from error
        return about if isinstance(about, dict) else {}

    def read_weights(self, *names: str) -> dict[str, Tensor]:
        """Returns the weights in the first of some files that there is."""
        found = next((self.path / name for name in names if (self.path / name).is_file()), None)
        if found is None:
            raise ModelLoadError(
                f"{self.path} has no {' or '.join(names)}: train or copy the head again."
            )
        try:
            if found.suffix == ".safetensors":
                return load_file(found)
            return _tensors(torch.load(found, map_location="cpu", weights_only=True))
        except (SafetensorError, UnpicklingError, RuntimeError, OSError, EOFError) as error:
            raise self.damaged(error, found.name) from error

    def fill(self, head: Network, weights: Mapping[str, Tensor]) -> Network:
        """Gives a network its weights, with the numbers' types that they have."""
        try:
            head.load_state_dict(weights, assign=True)
        except RuntimeError as error:
            raise self.damaged(error) from error
        return head.eval().requires_grad_(False)

    def write(self, about: Mapping[str, Any], weights: Mapping[str, Tensor], file: str) -> None:
        """Writes both files; a reader finds either the old ones or the new, never half of them."""
        self.path.mkdir(parents=True, exist_ok=True)
        kept = {name: value.detach().contiguous() for name, value in weights.items()}
        save_file(kept, self.path / f"{file}.part")
        text = json.dumps(about, indent=2) + "\n"
        (self.path / f"{CONFIG}.part").write_text(text, encoding="utf-8")
        for name in (file, CONFIG):
            (self.path / f"{name}.part").replace(self.path / name)

    def damaged(self, error: BaseException | str, file: str = "") -> ModelLoadError:
        """Returns the error for weights that cannot be read or do not fit."""
        return ModelLoadError(
            f"the weights in {self.path / file} are damaged, or not those that {CONFIG} describes "
            f"({first_line(error)}): train or copy the head again."
        )

    def unfit(self, kind: str, error: BaseException | str) -> ModelLoadError:
        """Returns the error for a configuration that says nothing usable."""
        return ModelLoadError(
            f"{self.path / CONFIG} does not describe a head of the kind {kind!r} "
            f"({first_line(error)}): train or copy the head again."
        )


def first_line(error: BaseException | str) -> str:
    """Returns the beginning of an error's text."""
    lines = [line.strip() for line in str(error).strip().split("\n")]
    return " ".join(lines[:2])[:200]


def _tensors(found: Any) -> dict[str, Tensor]:
    if not isinstance(found, Mapping) or not all(isinstance(x, Tensor) for x in found.values()):
        raise RuntimeError("not a table of tensors")
    return dict(found)
