"""Lets Qwen2.5 answer the prompts on a GPU: a thousand texts at once, some five million tokens in minutes.

    python lab/answers/on_a_gpu.py MODEL.gguf PROMPTS.npz --out ANSWERS.npz [--first 100] [--slots 1024]

PROMPTS.npz is what `python lab/answers/arrays.py prompts` writes. Every second answer is greedy, the others are drawn at
a temperature of .7; each ends by itself or at 512 tokens, as those of `write.py`. Long prompts come first, so
that what a step has to attend to shrinks. ANSWERS.npz holds `numbers`, `lengths` and all `tokens` in a row;
it is written every half minute.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from arrays import arrays, texts_in
from qwen2 import Qwen2
from torch import Tensor
from write import LONGEST, temperature

STEPS = 12
"""Steps between two looks at which answers have ended."""
EXTENT = 128
"""Attention covers a multiple of this."""


class Slots:
    """N texts that are written side by side."""

    def __init__(self, model: Qwen2, count: int, space: int) -> None:
        """space: tokens of the longest text, with its prompt."""
        device = model.device
        self.model, self.count = model, count
        shape = (len(model.layers), 2, count, model.groups, space, model.dim)
        self.cache = torch.zeros(shape, dtype=model.dtype, device=device)
        self.last = torch.zeros(count, dtype=torch.long, device=device)
        self.positions = torch.zeros(count, dtype=torch.long, device=device)
        self.written = torch.zeros(count, dtype=torch.long, device=device)
        self.alive = torch.zeros(count, dtype=torch.bool, device=device)
        self.temperature = torch.zeros(count, device=device)
        self.texts = torch.zeros(count, LONGEST, dtype=torch.long, device=device)
        self.ends = torch.tensor(sorted(model.ends), device=device)

    def begin(self, slots: list[int], prompts: list[np.ndarray], temperatures: list[float]) -> None:
        """Reads prompts into free slots and writes their first tokens."""
        model, device = self.model, self.model.device
        lengths = torch.tensor([len(each) for each in prompts], device=device)
        tokens = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
        for row, each in enumerate(prompts):
            tokens[row, : len(each)] = torch.from_numpy(each)
        at = torch.tensor(slots, device=device)
        shape = (len(model.layers), 2, len(slots), model.groups, tokens.shape[1], model.dim)
        read = torch.empty(shape, dtype=model.dtype, device=device)
        states, _ = model.read(tokens.to(device), cache=read)
        self.cache[:, :, at, :, : tokens.shape[1]] = read
        rows = torch.arange(len(slots), device=device)
        logits = states[rows, lengths - 1] @ model.output.T
        self.temperature[at] = torch.tensor(temperatures, device=device)
        self.positions[at], self.written[at], self.alive[at] = lengths, 0, True
        self.last[at] = self._drawn(logits, self.temperature[at])
        self._note(at)

    def steps(self, extent: int, count: int) -> None:
        """Writes ``count`` more tokens of each text that goes on."""
        every = torch.arange(self.count, device=self.model.device)
        for _ in range(count):
            logits = self.model.step(self.last, self.positions, self.cache, extent)
            found = self._drawn(logits, self.temperature)
            self.last = torch.where(self.alive, found, self.last)
            self.positions += self.alive
            self._note(every)

    def _note(self, where: Tensor) -> None:
        """Keeps the tokens that were just written in some slots; sees which texts have ended."""
        alive, written = self.alive[where], self.written[where]
        place = written.clamp_max(LONGEST - 1)
        kept = self.texts[where, place]
        self.texts[where, place] = torch.where(alive, self.last[where], kept)
        written = written + alive
        self.written[where] = written
        ended = (self.last[where, None] == self.ends).any(1) | (written >= LONGEST)
        self.alive[where] = alive & ~ended

    def _drawn(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """The likeliest tokens, or those drawn by the Gumbel trick."""
        noise = (
            torch.empty_like(logits, dtype=torch.float32).exponential_().clamp_min_(1e-20).log_()
        )
        return (logits.float() - temperature[:, None] * noise).argmax(-1)


def answers(
    model: Qwen2, prompts: list[np.ndarray], numbers: list[int], count: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the answers as they end, with the numbers of their prompts."""
    queue = deque(sorted(numbers, key=lambda number: -len(prompts[number])))
    longest = max(len(prompts[number]) for number in numbers)
    space = -(-(longest + LONGEST + STEPS) // EXTENT) * EXTENT
    slots = Slots(model, min(count, len(numbers)), space)
    holds: list[int | None] = [None] * slots.count
    lengths = np.zeros(slots.count, dtype=np.int64)  # of each slot's text, at most
    while queue or any(held is not None for held in holds):
        free = [slot for slot, held in enumerate(holds) if held is None]
        while free and queue:
            some = [free.pop() for _ in range(min(len(free), len(queue), 64))]
            chosen = [queue.popleft() for _ in some]
            slots.begin(
                some,
                [prompts[number] for number in chosen],
                [temperature(number) for number in chosen],
            )
            for slot, number in zip(some, chosen, strict=True):
                holds[slot], lengths[slot] = number, len(prompts[number])
        lengths += STEPS
        busy = [held is not None for held in holds]
        extent = -(-int(lengths[busy].max() + 1) // EXTENT) * EXTENT
        slots.steps(min(extent, space), STEPS)
        alive, written = slots.alive.tolist(), slots.written.tolist()
        ended = [slot for slot, held in enumerate(holds) if held is not None and not alive[slot]]
        texts = slots.texts[ended].cpu().numpy() if ended else []
        for slot, text in zip(ended, texts, strict=True):
            yield holds[slot], text[: written[slot]].astype(np.int32)  # type: ignore[misc]
            holds[slot], lengths[slot] = None, 0


def keep(path: Path, found: list[tuple[int, np.ndarray]]) -> None:
    part = path.with_suffix(".part.npz")
    np.savez(
        part,
        numbers=np.array([number for number, _ in found], dtype=np.int32),
        **arrays([text for _, text in found]),
    )
    part.replace(path)


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("model", type=Path)
    ask.add_argument("prompts", type=Path)
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--first", type=int, default=0, help="the first prompt that is answered")
    ask.add_argument("--count", type=int, help="prompts that are answered; unset: all others")
    ask.add_argument("--slots", type=int, default=1024)
    ask.add_argument("--seconds", type=float, default=1e9)
    given = ask.parse_args()
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Qwen2(given.model, device, torch.bfloat16)
    print(f"loaded in {time.monotonic() - began:.1f} s", flush=True)
    prompts = texts_in(np.load(given.prompts))
    last = len(prompts) if given.count is None else min(len(prompts), given.first + given.count)
    numbers = list(range(given.first, last))
    found: list[tuple[int, np.ndarray]] = []
    began = noted = time.monotonic()
    for answer in answers(model, prompts, numbers, given.slots):
        found.append(answer)
        now = time.monotonic()
        if now - noted > 30 or now - began > given.seconds:
            keep(given.out, found)
            noted = now
            tokens = sum(len(text) for _, text in found)
            print(f"{len(found):,} answers, {tokens / (now - began):,.0f} tokens/s", flush=True)
        if now - began > given.seconds:
            break
    keep(given.out, found)
    tokens = sum(len(text) for _, text in found)
    seconds = time.monotonic() - began
    print(f"{len(found):,} answers, {tokens:,} tokens, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
