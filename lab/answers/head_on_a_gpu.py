"""Trains an EAGLE-3 head for Qwen2.5 on its own answers, on a GPU, in a given number of seconds.

    python lab/answers/head_on_a_gpu.py MODEL.gguf PROMPTS.npz ANSWERS.npz --out FOLDER --seconds 300

The loss is that of `outpace train eagle3` (the head is unrolled over its own outputs, and each depth weighs .8
of the one above it), with two differences that save time: the target's distribution is taken over the head's own
tokens only, and attention is computed without the mask of all depths side by side. Texts of like length are read
together, 16,384 tokens a step. The learning rate follows the clock. `log.jsonl` gets the simulated acceptance
length (chains, greedy, held-out answers) at regular times, by kind of prompt; FOLDER is what `--draft` takes.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arrays import texts_in
from qwen2 import Qwen2
from torch import Tensor
from torch.nn import functional

from outpace.heads.base import TargetShape
from outpace.heads.checkpoint import save_head
from outpace.methods.heads.eagle3 import Eagle3, Eagle3Config
from outpace.train.recipe import DECAY

LONGEST = 768
"""Tokens of a text that is learned from, with its prompt."""
STEP = 16384
"""Tokens of a step."""
HELD = 50
"""Every such prompt is held out; these were answered greedily."""


@dataclass(frozen=True, eq=False)
class Texts:
    """Prompts with their answers."""

    tokens: list[np.ndarray]
    prompts: list[int]
    """Tokens of each prompt."""
    kinds: list[str]
    numbers: list[int]

    def chosen(self, numbers: list[int]) -> Texts:
        return Texts(
            *([getattr(self, name)[at] for at in numbers] for name in self.__annotations__)
        )


def texts_of(prompts: Path, answers: list[Path]) -> Texts:
    held = np.load(prompts)
    asked = texts_in(held)
    found = Texts([], [], [], [])
    for path in answers:
        given = np.load(path)
        for number, answer in zip(given["numbers"].tolist(), texts_in(given), strict=True):
            if len(asked[number]) < LONGEST - 64:
                found.tokens.append(np.concatenate([asked[number], answer])[:LONGEST])
                found.prompts.append(len(asked[number]))
                found.kinds.append(str(held["kinds"][number]))
                found.numbers.append(number)
    return found


@dataclass(frozen=True, eq=False)
class Batch:
    """B texts of at most T tokens, and the places of their answers' tokens."""

    tokens: Tensor  # [B, T + depths]
    rows: Tensor  # [A]
    places: Tensor  # [A]: after which token an answer's token follows


def batch_of(texts: Texts, numbers: list[int], depths: int, device: torch.device) -> Batch:
    longest = max(len(texts.tokens[at]) for at in numbers)
    longest = -(-longest // 16) * 16
    tokens = torch.zeros(len(numbers), longest + depths, dtype=torch.long)
    rows, places = [], []
    for row, at in enumerate(numbers):
        text = texts.tokens[at]
        tokens[row, : len(text)] = torch.from_numpy(text)
        follow = np.arange(texts.prompts[at] - 1, len(text) - 1)
        rows.append(np.full(len(follow), row))
        places.append(follow)
    return Batch(
        tokens.to(device, non_blocking=True),
        torch.from_numpy(np.concatenate(rows)).to(device, non_blocking=True),
        torch.from_numpy(np.concatenate(places)).to(device, non_blocking=True),
    )


def batches(texts: Texts, seed: int) -> Iterator[list[int]]:
    """Yields the numbers of texts that are read together, again and again, in another order each
    time."""
    draws = random.Random(seed)
    while True:
        order = sorted(
            range(len(texts.tokens)), key=lambda at: len(texts.tokens[at]) + draws.uniform(0, 24)
        )
        found: list[list[int]] = [[]]
        for at in order:
            if (len(found[-1]) + 1) * len(texts.tokens[at]) > STEP:
                found.append([])
            found[-1].append(at)
        draws.shuffle(found)
        yield from found


class Learner:
    """The head, unrolled over its own outputs."""

    def __init__(self, head: Eagle3, model: Qwen2) -> None:
        self.head, self.model = head, model
        self.depths: int = head.config.depths
        self.rows = model.output[head.d2t]  # [V', H]
        self.own = head.target_to_draft()

    def outputs(self, tokens: Tensor, states: Tensor) -> Iterator[Tensor]:
        """Yields the outputs ``[B, P, H]`` of each depth. tokens: ``[B, P + depths]``; states:
        ``[B, P, 3 H]``."""
        head, mid, attention = self.head, self.head.midlayer, self.head.midlayer.self_attn
        count = states.shape[1]
        heads, groups, dim = attention.heads, attention.groups, attention.head_dim
        embedded = mid.input_layernorm(self.model.embeddings[tokens].float())
        at = torch.arange(count + self.depths, device=tokens.device)
        steps = torch.arange(0, dim, 2, device=tokens.device).float() / dim
        angle = at[:, None].float() / float(head.config.rope["rope_theta"]) ** steps
        angle = torch.cat([angle, angle], -1)
        cosines, sines = angle.cos(), angle.sin()
        hidden = at[:count] > at[:count, None]  # [P, P]

        def turned(x: Tensor, depth: int) -> Tensor:
            """x: ``[B, P, heads D]`` -> ``[B, heads, P, D]``, at the positions of a depth."""
            x = x.unflatten(-1, (-1, dim)).transpose(1, 2)
            cos, sin = (
                each[depth - 1 : depth - 1 + count].to(x.dtype) for each in (cosines, sines)
            )
            left, right = x.chunk(2, -1)
            return x * cos + torch.cat([-right, left], -1) * sin

        guides = head.fc(states).float()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for depth in range(1, self.depths + 1):
            seen = torch.cat([embedded[:, depth : depth + count], mid.hidden_norm(guides)], -1)
            queries = turned(attention.q_proj(seen), depth) * dim**-0.5
            keys.append(turned(attention.k_proj(seen), depth))  # [B, G, P, D]
            values.append(attention.v_proj(seen).unflatten(-1, (groups, dim)).transpose(1, 2))
            queries = queries.unflatten(1, (groups, heads // groups))  # [B, G, heads / G, P, D]
            of_text = queries.flatten(2, 3) @ keys[0].transpose(-1, -2)  # [B, G, heads / G P, P]
            of_text = of_text.unflatten(2, (-1, count)).float().masked_fill(hidden, -math.inf)
            own = [(queries * each[:, :, None]).sum(-1, dtype=torch.float32) for each in keys[1:]]
            scores = torch.cat([of_text, *(each[..., None] for each in own)], -1)
            chances = scores.softmax(-1).to(queries.dtype)
            attended = (chances[..., :count].flatten(2, 3) @ values[0]).unflatten(2, (-1, count))
            for place, each in enumerate(values[1:]):
                attended = attended + chances[..., count + place, None] * each[:, :, None]
            joined = attended.flatten(1, 2).transpose(1, 2).flatten(2)  # [B, P, heads D]
            state = guides + attention.o_proj(joined)
            guides = state + mid.mlp(mid.post_attention_layernorm(state))
            yield guides

    def read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the states ``[B, P, 3 H]``, and those after the last layer that answers' tokens
        follow, ``[A, H]``."""
        last, kept = self.model.read(batch.tokens[:, : -self.depths], self.head.hidden_layers)
        states = torch.cat(kept, -1)[:, :-1]
        return states, last[batch.rows, batch.places]

    def loss(self, batch: Batch) -> Tensor:
        states, last = self.read(batch)
        with torch.no_grad():
            wanted = (last @ self.rows.T).float().softmax(-1).to(last.dtype)  # [A, V']
            following = batch.tokens[batch.rows, batch.places + 1]
            known = (self.own[following] >= 0).float()
            known = known / known.sum().clamp_min(1)
        total = states.new_zeros((), dtype=torch.float32)
        for depth, outputs in enumerate(self.outputs(batch.tokens[:, :-1], states), 1):
            found = outputs[batch.rows, batch.places - depth]  # [A, H]
            logits = self.head.lm_head(self.head.norm(found)).float()
            missed = functional.cross_entropy(logits, wanted.float(), reduction="none")
            total = total + DECAY ** (depth - 1) * (missed * known).sum()
        return total

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        """Returns whether the guesses of each depth ``[A, depths]`` are the text's tokens; the
        guess of depth d is for the token after ``places``, made d tokens before."""
        states, _ = self.read(batch)
        following = batch.tokens[batch.rows, batch.places + 1]
        return torch.stack(
            [
                self.head.d2t[
                    self.head.lm_head(
                        self.head.norm(outputs[batch.rows, batch.places - depth])
                    ).argmax(-1)
                ]
                == following
                for depth, outputs in enumerate(self.outputs(batch.tokens[:, :-1], states), 1)
            ],
            -1,
        )


def acceptance(hits: np.ndarray) -> tuple[int, int]:
    """Returns how many tokens of an answer were written in how many rounds, with chains as deep as
    the head. hits: ``[tokens, depths]``, as in `Learner.hits`."""
    count, depths = hits.shape
    root, rounds = 0, 0  # the first token is the prompt's pass's
    while root + 1 < count:
        accepted = 0
        while (
            accepted < depths
            and root + 1 + accepted < count
            and hits[root + 1 + accepted, accepted]
        ):
            accepted += 1
        root += accepted + 1
        rounds += 1
    return min(root, count - 1), rounds


def measured(learner: Learner, texts: Texts, device: torch.device) -> dict[str, Any]:
    """Returns the simulated acceptance length over all texts and by kind, and the share of right
    guesses by depth."""
    tokens, rounds = defaultdict(int), defaultdict(int)
    right, count = np.zeros(learner.depths), 0
    order = sorted(range(len(texts.tokens)), key=lambda at: len(texts.tokens[at]))
    for begin in range(0, len(order), 24):
        numbers = order[begin : begin + 24]
        batch = batch_of(texts, numbers, learner.depths, device)
        with torch.autocast(device.type, torch.bfloat16):
            hits = learner.hits(batch).cpu().numpy()
        rows = batch.rows.cpu().numpy()
        right, count = right + hits.sum(0), count + len(hits)
        for row, at in enumerate(numbers):
            written, made = acceptance(hits[rows == row])
            for kind in (texts.kinds[at], "all"):
                tokens[kind] += written
                rounds[kind] += made
    lengths = {kind: round(tokens[kind] / rounds[kind], 3) for kind in sorted(tokens)}
    return {"tau": lengths, "right": [round(float(each), 4) for each in right / count]}


def frequent(texts: Texts, count: int) -> Tensor:
    """Returns the most frequent tokens of answers, in ascending order."""
    every = np.concatenate(
        [text[begin:] for text, begin in zip(texts.tokens, texts.prompts, strict=True)]
    )
    found = np.bincount(every, minlength=count)
    chosen = np.sort(np.argsort(-found, kind="stable")[:count])
    print(f"{found[chosen].sum() / len(every):.4f} of {len(every):,} tokens are known", flush=True)
    return torch.from_numpy(chosen)


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("model", type=Path)
    ask.add_argument("prompts", type=Path)
    ask.add_argument("answers", type=Path, nargs="+")
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--seconds", type=float, default=300, help="of training")
    ask.add_argument("--lr", type=float, default=6e-4)
    ask.add_argument("--vocabulary", type=int, default=16384)
    ask.add_argument("--inner", type=int, default=3072)
    ask.add_argument("--depths", type=int, default=6)
    ask.add_argument("--reports", type=int, default=8)
    given = ask.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Qwen2(given.model, device, torch.bfloat16)
    every = texts_of(given.prompts, given.answers)
    held, learned = (
        every.chosen(
            [at for at, number in enumerate(every.numbers) if (number % HELD == 0) is wanted]
        )
        for wanted in (True, False)
    )
    config = Eagle3Config(
        depths=given.depths,
        heads=model.heads,
        groups=model.groups,
        head_dim=model.dim,
        inner_size=given.inner,
        draft_vocab_size=given.vocabulary,
        norm_eps=model.eps,
        rope={"rope_type": "default", "rope_theta": model.base},
    )
    shape = TargetShape(model.size, len(model.embeddings), len(model.layers))
    head = Eagle3(shape, config)
    head.d2t.copy_(frequent(learned, given.vocabulary))
    head.init_from_lm_head(model.output[head.d2t.to(device)].float().cpu())
    learner = Learner(head.to(device), model)
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        weights, lr=given.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
    )
    given.out.mkdir(parents=True, exist_ok=True)
    began, reports, tokens, losses, step = time.monotonic(), 0, 0, [], 0
    for numbers in batches(learned, 0):
        done = (time.monotonic() - began) / given.seconds
        if done >= reports / given.reports or done >= 1:
            loss = float(torch.stack(losses).mean()) if losses else math.nan
            report = {
                "step": step,
                "tokens": tokens,
                "seconds": round(done * given.seconds, 1),
                "loss": round(loss, 4),
                **measured(learner, held, device),
            }
            print(json.dumps(report), flush=True)
            with (given.out / "log.jsonl").open("a") as log:
                log.write(json.dumps(report) + "\n")
            save_head(copy.deepcopy(head).to("cpu", torch.bfloat16), given.out)
            reports, losses = reports + 1, []
            if done >= 1:
                break
        rate = (
            given.lr
            * min(1.0, (step + 1) / 60)
            * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = batch_of(learned, numbers, given.depths, device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss_now = learner.loss(batch)
        loss_now.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(loss_now.detach())
        tokens += sum(len(learned.tokens[at]) - learned.prompts[at] for at in numbers)
        step += 1
    print(f"{step:,} steps, {tokens:,} answered tokens, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
