"""The sub-layers that layer skipping leaves out, and the file that a search for them writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outpace.core.values import shown
from outpace.draft.fingerprint import Fingerprint
from outpace.errors import ConfigError
from outpace.files import replacing
from outpace.targets.base import SubLayers
from outpace.targets.hf.loading.loaded import LoadedModel

FORMAT = "outpace skipped layers, 1"


@dataclass(frozen=True)
class SkippedLayers:
    """Sub-layers that were found for one model."""

    model: Fingerprint
    skipped: SubLayers
    found: Mapping[str, Any] = field(default_factory=dict)
    """How well they did, for the reader of the file."""

    def for_model(self, loaded: LoadedModel) -> SubLayers:
        """Returns the sub-layers; ``ConfigError`` for another model than they were found for."""
        own = Fingerprint.of(loaded)
        if not self.model.same_model(own):
            raise ConfigError(
                f"the layers to skip were found for {self.model}, and the target is {own}: run "
                "`outpace tune layers` for this model."
            )
        return self.checked(self.skipped, loaded)

    @staticmethod
    def checked(skipped: SubLayers, loaded: LoadedModel) -> SubLayers:
        """Returns the same; ``ConfigError`` for layers that the model does not have, or for all of
        them."""
        count = int(loaded.config.num_hidden_layers)
        numbers = skipped.attention | skipped.mlp
        if any(number >= count for number in numbers):
            raise ConfigError(
                f"layers names layer {max(numbers)}, and the target has layers 0 to {count - 1}."
            )
        if len(skipped.complete_layers) == count:
            raise ConfigError("layers leaves out all layers of the target: keep some.")
        return skipped

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file that ``speculative_config`` takes as "layers"."""
        content = {
            "format": FORMAT,
            "model": asdict(self.model),
            "attention": sorted(self.skipped.attention),
            "mlp": sorted(self.skipped.mlp),
            "found": dict(self.found),
        }
        with replacing(Path(path)) as part:
            part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_skipped_layers(path: str | os.PathLike[str]) -> SkippedLayers:
    """Returns what a file of `SkippedLayers.save` says; ``ConfigError`` for any other."""
    where = str(path)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise KeyError("format")
        skipped = sub_layers({part: content[part] for part in ("attention", "mlp")})
        return SkippedLayers(Fingerprint(**content["model"]), skipped, content["found"])
    except OSError as error:
        raise ConfigError(
            f"cannot read the layers to skip from {where!r} ({error.strerror}): give the file that "
            "`outpace tune layers` wrote, a list of layers, or 'even'."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where!r} is not a file of `outpace tune layers`: run it again, or list the layers."
        ) from error


def sub_layers(given: Any) -> SubLayers:
    """Returns the sub-layers that a list or dict names; ``ConfigError`` for anything else."""
    if isinstance(given, (list, tuple)) and _are_layers(given):
        return SubLayers.of_layers(given)
    known = isinstance(given, Mapping) and set(given) <= {"attention", "mlp"}
    if not known or not all(map(_are_layers, given.values())):
        raise ConfigError(
            "layers must be a file of `outpace tune layers`, a list of layers (from 0), "
            f"{{'attention': [...], 'mlp': [...]}}, or 'even', not {shown(given)}."
        )
    return SubLayers(frozenset(given.get("attention", ())), frozenset(given.get("mlp", ())))


def _are_layers(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and all(
        isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in given
    )


def default_skipped_layers(count: int) -> SubLayers:
    """Returns the sub-layers that a model of ``count`` layers can probably do without: every second
    attention part after the first quarter, and every fourth MLP. Leaving out attention costs less
    than leaving out MLPs, and later layers less than early ones (Draft & Verify, figure 4)."""
    later = range(max(1, count // 4), min(count, max(2, count - 1)))
    return SubLayers(frozenset(later[::2]), frozenset(later[1::4]))
