"""Which drafter is fastest for the bundled target: a shallow or a deep one, a quick or a good one?

The question of "Decoding Speculative Decoding" (Yan et al. 2024, arXiv 2402.01528).

    python lab/measure/latency_study.py train --data DATA --run RUN   # goes on where it was stopped
    python lab/measure/latency_study.py count --data DATA --run RUN   # acceptance: no clock
    python lab/measure/latency_study.py time --data DATA --run RUN    # on a quiet machine

DATA holds ``corpus/``, ``corpus_heldout/`` and ``prompts/``. Four drafters with equally many
parameters learn from the target, in the same steps from the same text. The target was trained with
four layers, and sixteen that hardly change anything were put between these later
(bundle/README.md). So some of its layers are drafters that are trained as well as it is: of one
width, and of any depth.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from outpace import LLM, SamplingParams
from outpace.bench.prompts import read_prompts
from outpace.core.trees.tree import Tree
from outpace.llm import BUNDLED
from outpace.policy.lengths.adaptive import Constant
from outpace.train.data import blocks, documents

ROWS, BLOCK = 16, 256
PIECE = 256
"""Places whose distributions are compared at once: those of all would not fit into a processor's
cache."""
CUTS = {1: [0], 2: [0, 5], 3: [0, 5, 10], 4: [0, 5, 10, 15], 8: [0, 1, 5, 6, 10, 11, 15, 16]}
"""Layers of the target, by how many there are: 0, 5, 10 and 15 are those that it began with."""

HEAD_DIM = 32
LAYER_RATE, EMBEDDING_RATE, WARM_UP = 3e-3, 1e-3, 20
REPORTED = 10
"""Steps between two reports."""
DRAFTED, TOKENS, TEXTS = 4, 48, 6


@dataclass(frozen=True)
class Shape:
    """The sizes of a drafter; embeddings are tied, as the target's are."""

    layers: int
    hidden: int
    inner: int

    @property
    def name(self) -> str:
        return f"{self.layers}x{self.hidden}"


SHAPES = [Shape(1, 192, 768), Shape(2, 160, 672), Shape(4, 128, 560), Shape(8, 96, 464)]


def bundled(name: str) -> Any:
    """One of the bundled models as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(BUNDLED / name, dtype=torch.float32).eval()


def made(shape: Shape, target: Any) -> Any:
    """A drafter that has learned nothing: its embeddings are the target's in their strongest
    directions, and its layers add nothing yet."""
    torch.manual_seed(0)
    sizes = target.config.to_dict() | {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.hidden // HEAD_DIM,
        "num_key_value_heads": shape.hidden // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "dtype": "float32",
    }
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    embeddings = target.get_input_embeddings().weight.detach()
    directions = torch.linalg.svd(embeddings, full_matrices=False).Vh[: shape.hidden]  # [H, 256]
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embeddings @ directions.T)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model.float().eval()


# -- learning ------------------------------------------------------------------------------------


class Learner:
    """A drafter and its optimizer."""

    def __init__(self, shape: Shape, target: Any) -> None:
        self.shape, self.model = shape, made(shape, target)
        embedding = self.model.get_input_embeddings().weight
        others = [each for each in self.model.parameters() if each is not embedding]
        groups = [
            {"params": others, "top": LAYER_RATE},
            {"params": [embedding], "top": EMBEDDING_RATE},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def learn(self, tokens: Tensor, p: Tensor, step: int, steps: int, mixed: bool) -> float:
        """Takes one of ``steps`` towards the distributions p ``[P, V]``; returns the mean
        acceptance before it. mixed: whether products are made in bfloat16."""
        rate = min(1.0, (step + 1) / WARM_UP) * max(0.03, 1 - step / steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["top"]
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            found = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
            states = found.flatten(0, 1).float()  # [P, H]
            by_state, by_row, accepted = self._slopes(states.detach(), p, step / steps)
        self.optimizer.zero_grad(set_to_none=True)
        states.backward(by_state)
        self.model.get_input_embeddings().weight.grad += by_row
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return accepted

    @torch.no_grad()
    def _slopes(self, states: Tensor, p: Tensor, late: float) -> tuple[Tensor, Tensor, float]:
        """How the loss grows with the states ``[P, H]`` and with the rows of the embedding, and the
        mean acceptance. The loss is the divergence from p to q, and 1 minus the acceptance, which
        counts more and more (late: from 0 to 1)."""
        embedding = self.model.get_input_embeddings().weight
        by_state, by_row = torch.empty_like(states), torch.zeros_like(embedding)
        accepted = 0.0
        for first in range(0, len(states), PIECE):
            here = slice(first, first + PIECE)
            q = torch.softmax((states[here] @ embedding.T).float(), -1)
            below = torch.where(q < p[here], q, 0.0)  # the acceptance rises with these
            accepted += float(torch.minimum(q, p[here]).sum())
            share = below.sum(-1, keepdim=True)
            slope = q.mul_(1 + late * share).sub_(p[here]).sub_(below.mul_(late)).div_(len(states))
            by_state[here] = slope @ embedding
            by_row += slope.T @ states[here]
        return by_state, by_row, accepted / len(states)


def train(data: Path, run: Path, steps: int, mixed: bool) -> None:
    """Teaches all shapes at once: each step asks the target once."""
    run.mkdir(parents=True, exist_ok=True)
    target, tokenizer = bundled("target"), AutoTokenizer.from_pretrained(BUNDLED / "target")
    files = [data / "corpus" / "tinystories_sample.txt", data / "corpus" / "fairytales.txt"]
    texts = blocks(documents(files, tokenizer, "target"), tokenizer, BLOCK)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    print(f"{steps * ROWS * BLOCK:,} tokens from a text of {texts.numel():,}", flush=True)
    learners = [Learner(shape, target) for shape in SHAPES]
    saved, begin = run / "state.pt", 0
    if saved.exists():
        state = torch.load(saved)
        begin = state["step"]
        for learner, (model, optimizer) in zip(learners, state["learners"], strict=True):
            learner.model.load_state_dict(model)
            learner.optimizer.load_state_dict(optimizer)
    for step in range(begin, steps):
        places = torch.arange(step * ROWS, (step + 1) * ROWS) % len(order)
        tokens = texts[order[places]]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            p = target(input_ids=tokens, use_cache=False).logits.flatten(0, 1).float().softmax(-1)
        accepted = [learner.learn(tokens, p, step, steps, mixed) for learner in learners]
        if step % REPORTED == REPORTED - 1:
            figures = ", ".join(f"{a:.3f}" for a in accepted)
            print(f"step {step + 1}: {time.process_time():.0f} s, acceptance {figures}", flush=True)
            states = [(each.model.state_dict(), each.optimizer.state_dict()) for each in learners]
            torch.save({"step": step + 1, "learners": states}, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
            for learner in learners:
                keep(learner.model, run / learner.shape.name)


def keep(model: Any, out: Path) -> None:
    """Writes a drafter with the target's tokenizer."""
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / "target" / name, out / name)


# -- measuring -----------------------------------------------------------------------------------


def drafters(run: Path) -> dict[str, Path]:
    """The folders of what was trained, of the target's layers, and of the bundled drafter."""
    found = {shape.name: run / shape.name for shape in SHAPES if (run / shape.name).exists()}
    for count, layers in CUTS.items():
        name = f"{count} of the target"
        found[name] = run / name.replace(" ", "-")
        if not found[name].exists():
            model = bundled("target")
            model.model.layers = torch.nn.ModuleList(model.model.layers[at] for at in layers)
            model.config.num_hidden_layers = count
            keep(model, found[name])
    return {**found, "bundled (1x192)": BUNDLED / "drafter"}


def stories(data: Path) -> list[str]:
    listed = read_prompts("indomain", data)
    return [each.text for each in listed if each.task == "indomain/tinystories"][:TEXTS]


def count(data: Path, run: Path) -> None:
    """Counts what drafts of each bring, and how well each foresees text that none has learned
    from."""
    target, tokenizer = bundled("target"), AutoTokenizer.from_pretrained(BUNDLED / "target")
    held_out = documents([data / "corpus_heldout" / "tinystories_heldout.txt"], tokenizer, "target")
    text = blocks(held_out, tokenizer, BLOCK, 8 * BLOCK)
    with torch.no_grad():
        p = target(input_ids=text).logits.softmax(-1)
    prompts, found = stories(data), {}
    print("| drafter | parameters | nats per token | overlap | accepted of 4, greedy | at 0.8 |")
    print("|---|---|---|---|---|---|")
    for name, path in drafters(run).items():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(input_ids=text).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
        overlap = float(torch.minimum(p, logits.softmax(-1)).sum(-1).mean())
        llm = LLM(speculative_config={"model": str(path)}, max_num_seqs=len(prompts))
        llm.engine.controller = Constant(DRAFTED)
        accepted = [drafted(llm, prompts, temperature) for temperature in (0.0, 0.8)]
        parameters = sum(each.numel() for each in model.parameters())
        found[name] = {"loss": float(loss), "overlap": overlap, "accepted": accepted}
        figures = f"{loss:.2f} | {overlap:.3f} | {accepted[0]:.2f} | {accepted[1]:.2f}"
        print(f"| {name} | {parameters:,} | {figures} |", flush=True)
    (run / "count.json").write_text(json.dumps(found))


def drafted(llm: LLM, prompts: list[str], temperature: float) -> float:
    """The accepted tokens of a round, over all texts."""
    accepted = rounds = 0
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=TOKENS, ignore_eos=True)
    for output in llm.generate(prompts, params):
        accepted += output.metrics.num_accepted_tokens
        rounds += output.metrics.num_target_passes
    return accepted / rounds


def clock(data: Path, run: Path, seconds: float) -> None:
    """Times passes and greedy texts of all drafters in turns, so that neighbours meet all alike."""
    counted = json.loads((run / "count.json").read_text())
    prompts = stories(data)[:3]
    folders = drafters(run)
    engines = {name: LLM(speculative_config={"model": str(path)}) for name, path in folders.items()}
    for llm in engines.values():
        llm.engine.controller = Constant(DRAFTED)
    singles = {
        (name, kernels): LLM(path, cpu_kernels=kernels, generation_config="none", max_num_seqs=1)
        for name, path in folders.items()
        for kernels in ("auto", "off")
    }
    passes: dict[tuple[str, str], list[float]] = {name: [] for name in singles}
    took: dict[str, list[float]] = {name: [] for name in ("plain", *engines)}
    end, turn = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        for which, llm in singles.items():
            passes[which] += [milliseconds(llm) for _ in range(5)]
        for name in took:
            llm = engines.get(name, engines["bundled (1x192)"])
            params = SamplingParams(
                temperature=0, max_tokens=TOKENS, ignore_eos=True,
                speculative="off" if name == "plain" else None,
            )  # fmt: skip
            begin = time.perf_counter()
            llm.generate([prompts[turn % len(prompts)]], params)
            took[name].append(time.perf_counter() - begin)
        turn += 1
    medians = {name: statistics.median(times[len(prompts) :]) for name, times in took.items()}
    print(f"{turn} turns. Plain decoding: {TOKENS / medians['plain']:.0f} tokens/s")
    print("| drafter | ms of a pass | transformers' layers | accepted of 4 | tokens/s | of plain |")
    print("|---|---|---|---|---|---|")
    rows = []
    for name in engines:
        own = [statistics.median(passes[name, kernels]) for kernels in ("auto", "off")]
        accepted, speed = counted[name]["accepted"][0], TOKENS / medians[name]
        rows.append((own[0], accepted, counted[name]["loss"], speed))
        cells = [f"{ms:.2f}" for ms in own]
        cells += [f"{accepted:.2f}", f"{speed:.0f}", f"{medians['plain'] / medians[name]:.2f}"]
        print(f"| {name} | " + " | ".join(cells) + " |")
    speeds = [row[3] for row in rows]
    for at, what in enumerate(("a pass's time", "acceptance", "held-out loss")):
        print(f"speed and {what}: {statistics.correlation([row[at] for row in rows], speeds):+.2f}")


def milliseconds(llm: LLM) -> float:
    """One pass over one token after 128."""
    runner: Any = llm.engine.target.runner  # type: ignore[attr-defined]
    runner.admit(1)
    runner.lengths = [128]
    begin = time.perf_counter()
    runner.forward(torch.full((1, 1), 7), keep=1, tree=Tree.chain(1, 0))
    found = time.perf_counter() - begin
    runner.retain([])
    return found * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["train", "count", "time"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=70.0, help="of taking turns")
    parser.add_argument("--steps", type=int, default=1000, help="of training")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--bfloat16", action="store_true", help="for products: faster with AMX, else much slower"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.what == "train":
        train(options.data, options.run, options.steps, options.bfloat16)
    elif options.what == "count":
        count(options.data, options.run)
    else:
        clock(options.data, options.run, options.seconds)


if __name__ == "__main__":
    main()
