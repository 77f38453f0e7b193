"""Pairs of target and drafter that are made here and cost what real models cost: a byte-level
tokenizer, how often drafter and target agree on texts that the target generates, and the pair."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from outpace.bench.model_shapes import LaterLayersScale, ModelShape, first_layers, random_model
from outpace.core.values import shown
from outpace.errors import ConfigError
from outpace.targets.hf.loading.placing import DTYPES, pick_device

_CONSONANTS = "bdfghjklmnprstvz"
_VOWELS = "aeiou"
SPECIAL = "<|endoftext|>"


def word(number: int) -> str:
    """Returns the made-up word of a number; different numbers give different words.

    >>> word(0), word(81)
    ('baba', 'bebe')
    """
    syllables = len(_CONSONANTS) * len(_VOWELS)
    text = ""
    while number or len(text) < 4:
        number, digit = divmod(number, syllables)
        consonant, vowel = divmod(digit, len(_VOWELS))
        text += _CONSONANTS[consonant] + _VOWELS[vowel]
    return text


def byte_tokenizer(vocabulary: int) -> Any:
    """Returns a tokenizer in which every id of the vocabulary has a text.

    Ids 0-255 are the bytes, into which every text is encoded; 256 is the padding; the rest are
    words that appear in generated texts only. No id ends a text.
    """
    # Sorted, so that the same byte has the same id in every process.
    entries = {
        char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    entries[SPECIAL] = len(entries)
    for number in range(vocabulary - len(entries)):
        entries["Ġ" + word(number)] = len(entries)
    tokenizer = Tokenizer(models.BPE(vocab=entries, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, pad_token=SPECIAL)


# -- agreement ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """How a pair agrees, and how varied the target's texts are."""

    greedy: float
    """Share of positions where drafter and target have the same most probable token."""
    sampled: float
    """Mean of sum(min(p, q)) at temperature 1 on sampled text: the token rule's acceptance."""
    entropy: float
    """Mean entropy of the target's distribution at temperature 1, in nats."""
    distinct_tokens: float
    """Different tokens / tokens, mean over the greedy texts."""
    distinct_4grams: float
    """The same for runs of four tokens: near 0 where a text goes in circles."""
    positions: int


@dataclass(frozen=True)
class Texts:
    """Prompts to measure on, and how many tokens to generate after each."""

    prompts: Tensor  # [R, T]
    tokens: int

    @classmethod
    def random(cls, count: int, tokens: int, seed: int, device: torch.device) -> Texts:
        """Returns prompts of random bytes, 12 tokens each."""
        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(0, 256, (count, 12), generator=generator)
        return cls(prompts.to(device), tokens)


@torch.inference_mode()
def generated(target: Any, texts: Texts, seed: int | None = None) -> Tensor:
    """Returns ``[R, T + tokens]``, prompt and text: greedy, or at temperature 1 with a seed."""
    options: dict[str, Any] = {"do_sample": False}
    if seed is not None:
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed or 0)
        found: Tensor = target.generate(
            texts.prompts,
            attention_mask=torch.ones_like(texts.prompts),
            max_new_tokens=texts.tokens,
            **options,
        )
    return found


@torch.inference_mode()
def greedy_agreement(drafter: Any, sequences: Tensor, start: int) -> float:
    """Returns the share of positions at which the drafter's most probable token is the text's.

    sequences: ``[R, T]``, prompts and the target's greedy texts, which begin at ``start``.
    """
    hits = [
        (drafter(row[None]).logits[0, start - 1 : -1].argmax(-1) == row[start:]).double().mean()
        for row in sequences
    ]
    return float(torch.stack(hits).mean())


@torch.inference_mode()
def sampled_agreement(
    target: Any, drafter: Any, sequences: Tensor, start: int
) -> tuple[float, float]:
    """Returns the mean of sum(min(p, q)) and the mean entropy of p along sampled texts."""
    overlap, entropy = [], []
    for row in sequences:
        p, q = (
            model(row[None]).logits[0, start - 1 : -1].float().softmax(-1)
            for model in (target, drafter)
        )
        overlap.append(torch.minimum(p, q).sum(-1).double().mean())
        entropy.append(torch.special.entr(p).sum(-1).double().mean())
    return float(torch.stack(overlap).mean()), float(torch.stack(entropy).mean())


def distinct(texts: Sequence[Sequence[int]], size: int) -> float:
    """Returns the share of different n-grams among a text's n-grams, mean over texts.

    >>> distinct([[1, 2, 1, 2]], 1), distinct([[1, 2, 3, 4]], 2)
    (0.5, 1.0)
    """
    shares = []
    for text in texts:
        grams = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
        shares.append(len(set(grams)) / max(1, len(grams)))
    return sum(shares) / len(shares)


def measure(target: Any, drafter: Any, texts: Texts, seed: int) -> Agreement:
    """Returns the agreement of a pair on fresh greedy and sampled text."""
    start = texts.prompts.shape[1]
    greedy = generated(target, texts)
    rate = greedy_agreement(drafter, greedy, start)
    overlap, entropy = sampled_agreement(target, drafter, generated(target, texts, seed), start)
    plain = greedy[:, start:].tolist()
    return Agreement(
        greedy=rate,
        sampled=overlap,
        entropy=entropy,
        distinct_tokens=distinct(plain, 1),
        distinct_4grams=distinct(plain, 4),
        positions=texts.prompts.shape[0] * texts.tokens,
    )


# -- the pair ----------------------------------------------------------------------------------


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
    """Factor on what the target's layers after the drafter add."""
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
