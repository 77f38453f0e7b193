"""Trains the bundled pair: a target and, on the logits of the same forward, its drafter.

The schedule follows the clock, not a number of steps, so a run ends when it should on any machine.
The target starts shallow and is deepened late by layers that begin as the identity; in the last
part it is frozen and only the drafter learns.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizer as vocabulary
import torch
from corpus import HELDOUT, SHARES, Mix, documents, streams
from export import load_exported, save_pair
from loss import MEANS, Weights, chunk, heads
from muon import Muon
from network import DRAFTER, TARGET, Network, Parts, cut, grow
from torch import Tensor

WARMUP_STEPS = 20
TOKENIZER_PART = 4_000_000


@dataclass(frozen=True)
class Stage:
    """What holds until a fraction of the time is over."""

    until: float
    layers: int
    length: int
    frozen: bool = False


# Few tokens fit into the time, and they teach more when a step is cheap: hence shallow for long.
STAGES = (
    Stage(0.58, 4, 256),
    Stage(0.66, 4, 512),
    Stage(0.70, 4, 1024),
    Stage(0.91, 20, 512),
    Stage(0.93, 20, 1024, frozen=True),
    Stage(1.00, 20, 256, frozen=True),
)


def stage_at(fraction: float) -> Stage:
    return next((stage for stage in STAGES if fraction < stage.until), STAGES[-1])


def ramp(fraction: float, start: float, end: float) -> float:
    """1 until `start`, then linearly down to 0 at `end`."""
    return min(1.0, max(0.0, (end - fraction) / (end - start)))


def target_rate(fraction: float) -> float:
    return max(0.02, ramp(fraction, 0.55, 0.92))


def drafter_rate(fraction: float) -> float:
    return max(0.02, ramp(fraction, 0.55, 1.0))


def losses_at(fraction: float) -> Weights:
    """From the text and the target's distribution towards the acceptance itself."""
    late = 1 - ramp(fraction, 0.5, 0.9)
    return Weights(text=0.1 * (1 - late), distribution=0.9 - 0.4 * late, acceptance=1.0 * late)


class Pair:
    """The two networks in training, and their optimisers."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options = options
        self.device = device
        self.distribution = torch.compile(chunk, dynamic=False) if options.compile else chunk
        target, drafter = self._start(STAGES[0].layers)
        self.target, self.drafter = target.to(device), drafter.to(device)
        if options.compile:
            self.target.parts = self.drafter.parts = Parts.compiled()
        self.since_growth = 0
        self.optimisers: dict[str, tuple[Muon, torch.optim.AdamW]] = {}
        self._make("target", self.target)
        self._make("drafter", self.drafter)

    def _start(self, layers: int) -> tuple[Network, Network]:
        """Fresh networks, or those of a finished pair, its target as shallow as a fresh one."""
        if self.options.start is None:
            return Network(TARGET, layers), Network(DRAFTER, DRAFTER.layers)
        target = load_exported(self.options.start / "target", TARGET)
        return cut(target, layers), load_exported(self.options.start / "drafter", DRAFTER)

    def _make(self, name: str, network: Network) -> None:
        muon = Muon(network.matrices(), self.options.matrix_rate, decay=self.options.decay)
        adam = torch.optim.AdamW(
            network.others(), self.options.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.optimisers[name] = (muon, adam)

    def deepen(self, layers: int) -> None:
        """Grows the target; its optimisers start afresh, warmed up again."""
        self.target = grow(self.target, layers)
        self._make("target", self.target)
        self.since_growth = 0

    def step(self, tokens: Tensor, fraction: float, frozen: bool) -> Tensor:
        """One update of both, or of the drafter alone; returns the batch's means."""
        inputs, labels = tokens[:, :-1], tokens[:, 1:].flatten()
        cuda = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            with torch.set_grad_enabled(not frozen):
                wide = self.target(inputs)
            narrow = self.drafter(inputs)
            result = heads(
                wide.detach().flatten(0, 1),
                self.target.embedding.detach(),
                narrow.detach().flatten(0, 1),
                self.drafter.embedding.detach(),
                labels,
                losses_at(fraction),
                self.distribution,
            )
        narrow.backward(result.drafter.view_as(narrow))
        self.drafter.embedding.grad += result.drafter_embedding
        self._update("drafter", drafter_rate(fraction))
        if not frozen:
            wide.backward(result.target.view_as(wide))
            self.target.embedding.grad += result.target_embedding
            warm = min(1.0, (self.since_growth + 1) / WARMUP_STEPS)
            self._update("target", target_rate(fraction) * warm)
            self.since_growth += 1
        return result.means

    def _update(self, name: str, share: float) -> None:
        muon, adam = self.optimisers[name]
        for optimiser, rate in ((muon, self.options.matrix_rate), (adam, self.options.rate)):
            for group in optimiser.param_groups:
                group["lr"] = rate * share
            optimiser.step()
            optimiser.zero_grad()

    @torch.no_grad()
    def measure(self, stream: np.ndarray, batches: int = 2, length: int = 512) -> list[float]:
        """The means over evenly spaced rows of held-out text."""
        rows = max(1, self.options.batch_tokens // length)
        starts = np.linspace(0, len(stream) - length - 2, rows * batches).astype(int)
        crops = np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64)
        means = []
        for tokens in torch.from_numpy(crops).to(self.device).split(rows):
            both = (self.target, self.drafter)
            wide, narrow = (network(tokens[:, :-1]).flatten(0, 1) for network in both)
            embeddings = self.target.embedding, self.drafter.embedding
            labels = tokens[:, 1:].flatten()
            result = heads(wide, embeddings[0], narrow, embeddings[1], labels, Weights(0, 0, 0))
            means.append(result.means)
        return torch.stack(means).mean(0).tolist()

    def state(self) -> dict[str, object]:
        return {
            "target": self.target.state_dict(),
            "drafter": self.drafter.state_dict(),
            "since_growth": self.since_growth,
            "optimisers": {
                name: [optimiser.state_dict() for optimiser in both]
                for name, both in self.optimisers.items()
            },
        }

    def restore(self, state: dict[str, object]) -> None:
        layers = state["target"]["qkv"].shape[0]  # type: ignore[index]
        if layers != self.target.layers:
            self.deepen(layers)
        self.target.load_state_dict(state["target"])  # type: ignore[arg-type]
        self.drafter.load_state_dict(state["drafter"])  # type: ignore[arg-type]
        self.since_growth = int(state["since_growth"])  # type: ignore[call-overload]
        for name, both in self.optimisers.items():
            for optimiser, saved in zip(both, state["optimisers"][name], strict=True):  # type: ignore[index]
                optimiser.load_state_dict(saved)


class Run:
    """A training run: its data, its clock, its log and its checkpoints."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder: Path = options.run
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "tokenizer.json"
        if not path.exists() and options.start:
            shutil.copy(options.start / "target" / "tokenizer.json", path)
        elif not path.exists():
            texts = (
                text for source in SHARES for text in self._sample(documents(options.data, source))
            )
            vocabulary.train(texts).save(str(path))
        self.tokenizer = vocabulary.load(path)
        self.streams = streams(options.data, self.tokenizer, self.folder / "tokens")
        self.mix = Mix(self.streams, options.seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.pair = Pair(options, self.device)
        self.elapsed = 0.0
        self.steps = 0
        self.tokens = 0
        if (self.folder / "pair.pt").exists():
            self._resume()

    def _sample(self, texts: list[str]) -> list[str]:
        """Documents of one source up to `TOKENIZER_PART` characters."""
        kept, size = [], 0
        for text in texts:
            if size >= TOKENIZER_PART:
                break
            kept.append(text[: TOKENIZER_PART - size])
            size += len(text)
        return kept

    def _resume(self) -> None:
        state = torch.load(self.folder / "pair.pt", map_location=self.device, weights_only=True)
        self.pair.restore(state)
        self.mix.restore(state["mix"])
        self.elapsed, self.steps, self.tokens = state["clock"]

    def save(self) -> None:
        """A checkpoint, and the pair in Transformers' format if that is asked for."""
        state = self.pair.state()
        state["mix"] = self.mix.state()
        state["clock"] = [self.elapsed, self.steps, self.tokens]
        scratch = self.folder / "pair.pt.new"
        torch.save(state, scratch)
        scratch.replace(self.folder / "pair.pt")
        if self.options.export:
            save_pair(self.pair.target, self.pair.drafter, self.tokenizer, self.options.export)

    def log(self, kind: str, means: list[float], **more: object) -> None:
        """One line of the log, kept and printed."""
        row = {"kind": kind, "minutes": round(self.elapsed / 60, 2), "step": self.steps}
        row |= {"tokens": self.tokens} | more
        row |= {name: round(mean, 4) for name, mean in zip(MEANS, means, strict=True)}
        line = json.dumps(row)
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def check(self) -> None:
        """The means on held-out text, into the log."""
        for source in HELDOUT:
            self.log("heldout", self.pair.measure(self.streams[source]), source=source)

    def _clock(self) -> float:
        """Seconds of work: on a CPU those that the threads really had, whatever else ran there."""
        if self.device.type == "cpu":
            return time.process_time() / self.options.threads
        return time.monotonic()

    def train(self) -> None:
        """Trains until the time is over."""
        total = 60.0 * self.options.minutes
        before, saved = self._clock(), self.elapsed
        recent: list[Tensor] = []
        self.save()
        while self.elapsed < total:
            fraction = self.elapsed / total
            stage = stage_at(fraction)
            if stage.layers != self.pair.target.layers:
                self.pair.deepen(stage.layers)
            rows = max(1, self.options.batch_tokens // stage.length)
            tokens = torch.from_numpy(self.mix.batch(rows, stage.length)).to(self.device)
            recent.append(self.pair.step(tokens, fraction, stage.frozen))
            self.steps += 1
            self.tokens += rows * stage.length
            now = self._clock()
            self.elapsed, before = self.elapsed + now - before, now
            if self.steps % self.options.log_every == 0:
                self.log("train", torch.stack(recent).mean(0).tolist(), layers=stage.layers)
                recent.clear()
            if self.elapsed - saved > 60 * self.options.save_minutes:
                saved = self.elapsed
                self.check()
                self.save()
        self.check()
        self.save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with corpus/ and corpus_heldout/")
    add("--run", type=Path, required=True, help="folder for checkpoints and log; resumes from it")
    add("--start", type=Path, help="a pair to go on from, with its tokenizer, instead of afresh")
    add("--export", type=Path, help="folder for target/ and drafter/, renewed at each checkpoint")
    add("--minutes", type=float, default=90, help="length of the whole run, resumed parts together")
    add("--batch-tokens", type=int, default=2048, help="tokens per step")
    add("--matrix-rate", type=float, default=5e-3, help="learning rate of the layers' matrices")
    add("--rate", type=float, default=3e-3, help="learning rate of embeddings and norms")
    add("--decay", type=float, default=0.05, help="weight decay of the layers' matrices")
    add("--save-minutes", type=float, default=10, help="minutes between checkpoints")
    add("--log-every", type=int, default=50, help="steps between lines of the log")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--seed", type=int, default=0, help="of the first weights and of the order of the text")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # Lets oneDNN multiply, which on some processors is twice as fast as MKL and hardly less exact.
    torch.set_float32_matmul_precision("medium")
    torch.manual_seed(options.seed)
    Run(options).train()


if __name__ == "__main__":
    main()
