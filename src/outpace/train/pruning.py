"""Which layers of a model are kept, to begin a smaller one with.

A model without some of its layers still says much of what it said, if they are the right ones. In
each turn that layer is left out without which the model stays closest to the target, on a piece of
text. Layers that change the states least (Men et al. 2024, ShortGPT, arXiv 2403.03853) take one
pass to find, but some of them are needed all the same; lab/measure/pruned_layers.py compares the
ways.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from outpace.heads.saving import saving
from outpace.targets.base import SubLayers
from outpace.targets.hf.partial.layers import decoder_layers, skipping
from outpace.train.draft_model import check_layers
from outpace.train.teacher import Lesson

KEPT = "layers.json"
"""The file that says, beside a model that learns, which layers it began with."""

PLACES = 128
"""Places of a text at which a model is compared with the target."""

Distance = Callable[[], float]
"""How far a model is from the target as it is now, with some of its layers left out."""

Report = Callable[[str, float], None]
"""Is told what is being done, and which share of it is done."""


def closest_layers(
    model: nn.Module, wanted: int, name: str, distance: Distance, report: Report
) -> list[int]:
    """Returns the numbers of n layers of a model, in order, with which it stays close to the
    target. The model itself is not changed.

    name: what users call it. Raises ``ConfigError`` where it has fewer.
    """
    count = len(decoder_layers(model))
    check_layers(wanted, count, name)
    out: set[int] = set()
    trials = sum(range(wanted + 1, count + 1))
    done = 0
    if trials:
        report("which layers to keep", 0.0)
    while len(out) < count - wanted:
        found = {}
        for layer in set(range(count)) - out:
            with skipping(model, SubLayers.whole({*out, layer})):
                found[layer] = distance()
            done += 1
            report("which layers to keep", done / trials)
        out.add(min(found, key=lambda layer: (found[layer], layer)))
    return sorted(set(range(count)) - out)


def thinned(lesson: Lesson) -> Lesson:
    """Returns a lesson of which only `PLACES` places count, evenly spaced: distributions over a
    large vocabulary take longer than the layers do."""
    batch, length = lesson.tokens.shape
    numbers = torch.linspace(0, batch * length - 1, min(PLACES, batch * length)).round().long()
    learned = torch.zeros(batch * length, dtype=torch.bool)
    learned[numbers] = True
    own: Tensor = learned.view(batch, length).to(lesson.tokens.device)
    return Lesson(lesson.tokens, lesson.states, lesson.top_tokens, lesson.top_chances, own)


def find_kept(out: Path, start: str, wanted: int) -> list[int] | None:
    """Returns the layers that a run in this folder began with, if it kept as many of this start."""
    try:
        found = json.loads((out / KEPT).read_text(encoding="utf-8"))
        known = found["start"] == start and len(found["kept"]) == wanted
        return [int(layer) for layer in found["kept"]] if known else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def note_kept(out: Path, start: str, kept: list[int]) -> None:
    """Writes which layers a run begins with: the same ones when it goes on."""
    out.mkdir(parents=True, exist_ok=True)
    part = out / f"{KEPT}.part"
    with saving(out / KEPT):
        part.write_text(json.dumps({"start": start, "kept": kept}) + "\n", encoding="utf-8")
        part.replace(out / KEPT)
