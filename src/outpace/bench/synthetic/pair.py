"""Synthetic pairs of target and drafter: they cost what real models cost and need no download.

The target is a random Llama or Qwen. Its first layers, with the target's own norm and head, are the
drafter. What the target's later layers add is scaled until the two agree at the asked rate.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.bench.synthetic.agreement import Agreement, Texts, generated, greedy_agreement, measure
from outpace.bench.synthetic.model_shapes import ModelShape
from outpace.bench.synthetic.tokens import byte_tokenizer
from outpace.bench.synthetic.weights import LaterLayersScale, first_layers, random_model
from outpace.core.values import shown
from outpace.errors import ConfigError
from outpace.targets.hf.loading.load import DTYPES, pick_device

TARGET, DRAFTER, FACTS = "target", "drafter", "pair.json"
"""What a pair is written to: two folders, and a file that says how they were made."""

_REPEATS = 0.5
"""A text with fewer distinct 4-grams than this goes in circles, which no real text does."""


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """How to make a pair."""

    agreement: float = 0.75
    dtype: str = "float32"
    device: str = "auto"
    seed: int = 0
    texts: int = 16
    tokens: int = 64
    tolerance: float = 0.015
    """How far from ``agreement`` the pair may be; the sampling error of 16 texts of 64 tokens is
    about 0.013."""
    rounds: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.agreement < 1:
            raise ConfigError(f"agreement must be between 0 and 1, not {self.agreement}.")
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"unknown dtype {shown(self.dtype)}: choose from {', '.join(DTYPES)}."
            )
        if self.texts < 1 or self.tokens < 8:
            raise ConfigError("calibration needs at least 1 text of 8 tokens.")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A pair that was written, and the agreement that it has."""

    target: str
    drafter: str
    shape: ModelShape
    options: PairOptions
    scale: float
    """Factor on what the target's layers behind the drafter add."""
    measured: Agreement
    """Measured on other texts than the scale was chosen on."""
    target_parameters: int
    drafter_parameters: int

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values, as in ``pair.json``."""
        return dataclasses.asdict(self)


def check_free(out: Path) -> None:
    """Raises ``ConfigError`` where `make_pair` would write over models that it has not made."""
    made_here = (out / FACTS).is_file()
    models = [name for name in (TARGET, DRAFTER) if (out / name / "config.json").exists()]
    if models and not made_here:
        raise ConfigError(
            f"--out: {str(out / models[0])!r} holds a model, which would be overwritten: name "
            "another folder."
        )


def make_pair(shape: ModelShape, options: PairOptions, out: Path) -> Pair:
    """Writes ``out/target``, ``out/drafter`` and ``out/pair.json``, and returns the pair.

    Raises ``ConfigError`` if the target's texts go in circles.
    """
    device = pick_device(options.device)
    target = random_model(shape, DTYPES[options.dtype], device, options.seed)
    drafter = first_layers(target, shape)
    scale = _calibrate(target, drafter, shape, options)
    fresh = Texts.random(options.texts, options.tokens, options.seed + 2, device)
    found = measure(target, drafter, fresh, options.seed)
    if found.distinct_4grams < _REPEATS:
        raise ConfigError(
            f"texts of this shape go in circles ({found.distinct_4grams:.0%} distinct 4-grams): "
            "use another seed, more layers or a larger width."
        )
    tokenizer = byte_tokenizer(shape.vocab)
    for name, model in ((TARGET, target), (DRAFTER, drafter)):
        model.save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
    pair = Pair(
        target=str(out / TARGET),
        drafter=str(out / DRAFTER),
        shape=shape,
        options=options,
        scale=scale,
        measured=found,
        target_parameters=target.num_parameters(),
        drafter_parameters=drafter.num_parameters(),
    )
    (out / FACTS).write_text(json.dumps(pair.as_dict(), indent=2) + "\n", encoding="utf-8")
    return pair


def _calibrate(target: Any, drafter: Any, shape: ModelShape, options: PairOptions) -> float:
    """Scales the target's later layers; returns the scale."""
    texts = Texts.random(options.texts, options.tokens, options.seed + 1, target.device)
    factor = LaterLayersScale(target, shape)

    def agreement_at(scale: float) -> float:
        factor.scale = scale
        return greedy_agreement(drafter, generated(target, texts), texts.prompts.shape[1])

    factor.scale = find_scale(agreement_at, options.agreement, options.tolerance, options.rounds)
    factor.fix()
    return factor.scale


def find_scale(
    agreement_at: Callable[[float], float], asked: float, tolerance: float, rounds: int
) -> float:
    """Returns a scale at which a falling function is near ``asked``: bisection in the logarithm.

    Stops within the tolerance, or after ``rounds`` evaluations with the nearest scale seen.

    >>> round(find_scale(lambda s: 1 / (1 + 5 * s), 0.5, 1e-3, 30), 2)
    0.2
    """
    low, high, scale = 1e-4, 4.0, 0.06
    nearest, distance = scale, math.inf
    for _ in range(rounds):
        reached = agreement_at(scale)
        if abs(reached - asked) < distance:
            nearest, distance = scale, abs(reached - asked)
        if distance <= tolerance:
            break
        low, high = (scale, high) if reached > asked else (low, scale)
        scale = _between(low, high, scale, reached, asked)
    return nearest


def _between(low: float, high: float, scale: float, reached: float, asked: float) -> float:
    """The next scale to try, inside the bracket: disagreement is about proportional to a small
    scale; where that leads too near to an end, the middle of the logarithms is taken."""
    guess = scale * (1 - asked) / max(1 - reached, 1e-3)
    inside = low * (high / low) ** 0.05 < guess < high / (high / low) ** 0.05
    return guess if inside else math.sqrt(low * high)


def describe(pair: Pair) -> dict[str, str]:
    """Returns the pair's properties as printable pairs of name and value."""
    found = pair.measured
    return {
        "target": f"{pair.target} ({pair.target_parameters / 1e6:.1f}M parameters)",
        "drafter": f"{pair.drafter} ({pair.drafter_parameters / 1e6:.1f}M)",
        "greedy agreement": f"{found.greedy:.3f} (asked: {pair.options.agreement})",
        "sampled acceptance": f"{found.sampled:.3f} at temperature 1",
        "entropy": f"{found.entropy:.2f} nats",
        "distinct tokens, 4-grams": f"{found.distinct_tokens:.2f}, {found.distinct_4grams:.2f}",
        "measured on": f"{found.positions} fresh positions",
    }
