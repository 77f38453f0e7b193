"""How often drafter and target agree, measured on texts that the target generates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
