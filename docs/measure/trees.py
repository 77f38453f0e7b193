"""Drafted tokens that are accepted in a round, by the kind of draft, at equal numbers of nodes.

    python docs/measure/trees.py

The bundled pair goes on with the built-in prompts, at temperature 0 and 0.8. Nothing is timed. The
shape of the drawn trees is the best one (`outpace.core.trees.best_shape`) for the chances that are seen
in a first run; those of the chosen ones follow the drafter's probabilities.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from outpace import LLM, SamplingParams
from outpace.bench.builtin import BUILT_IN
from outpace.core.trees.best_shape import BestShapes
from outpace.core.trees.tree_shape import Chances, TreeShape
from outpace.policy.acceptance import Acceptance
from outpace.policy.lengths.constant import Constant

NODES = (2, 4, 8, 16)
SEEDS = (1, 2)
LEVELS, SIBLINGS = 12, 4
KINDS: dict[str, dict[str, Any]] = {
    "chain": {"method": "draft_model"},
    "chosen nodes": {
        "method": "draft_tree",
        "branching": "dynamic",
        "top_k": SIBLINGS,
        "depth": LEVELS,
    },
    "drawn siblings": {"method": "draft_tree"},
}
PROMPTS = [text for _, _, text in BUILT_IN]


def accepted(llm: LLM, temperature: float) -> list[float]:
    """Returns the accepted tokens of a round, of each text."""
    found = []
    for seed in SEEDS if temperature else SEEDS[:1]:
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=64, ignore_eos=True)
        for output in llm.generate(PROMPTS, params):
            metrics = output.outputs[0].metrics
            found.append(metrics.num_accepted_tokens / metrics.num_target_passes)
    return found


def seen(llm: LLM, temperature: float) -> Chances:
    """Returns the chances by depth and rank, from drafts of a wide tree."""
    shape = TreeShape.branching([SIBLINGS, 2, 1, 1, 1])
    llm.engine.controller = Constant(shape.size, shape=shape)
    acceptance = Acceptance()
    request = acceptance.new()

    def learn(trace: Any) -> None:
        for count, decision in zip(trace.proposal.counts.tolist(), trace.decisions, strict=True):
            acceptance.learn(request, shape.first(count).trail(decision.path))

    with llm.engine.observing(learn):
        accepted(llm, temperature)
    return acceptance.typical(LEVELS, SIBLINGS)


def calibration(llm: LLM) -> tuple[float, float]:
    """Returns how probable the drafter finds its likeliest token in greedy texts of the target, and
    how often it is the target's; both are means over all tokens."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    probable, right = [], []
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        text = torch.tensor(output.outputs[0].token_ids)
        ids = torch.tensor([[*llm.tokenizer(prompt).input_ids, *text.tolist()]])
        with torch.inference_mode():
            logits = llm.engine.drafter.loaded.model(input_ids=ids).logits[0, -len(text) - 1 : -1]
        best = logits.float().softmax(-1).max(-1)
        probable += best.values.tolist()
        right += (best.indices == text).tolist()
    return statistics.mean(probable), statistics.mean(right)


def main() -> None:
    models = {
        name: LLM(speculative_config=config, max_num_seqs=len(PROMPTS))
        for name, config in KINDS.items()
    }
    print("| temperature | nodes | " + " | ".join(KINDS) + " | shape |")
    print("|---|---|" + "---|" * (len(KINDS) + 1))
    for temperature in (0.0, 0.8):
        chances = seen(models["drawn siblings"], temperature)
        for nodes in NODES:
            shape = BestShapes(nodes, LEVELS, chances).shape(nodes)
            cells = []
            for name, llm in models.items():
                own = shape if name == "drawn siblings" else None
                llm.engine.controller = Constant(nodes, shape=own)
                texts = accepted(llm, temperature)
                error = statistics.stdev(texts) / len(texts) ** 0.5
                cells.append(f"{statistics.mean(texts):.2f} ± {error:.2f}")
            levels = ", ".join(str(len(level)) for level in shape.levels)
            print(
                f"| {temperature} | {nodes} | " + " | ".join(cells) + f" | {levels} |", flush=True
            )
    probable, right = calibration(models["chain"])
    print(f"The likeliest token: probability {probable:.2f}, the target's in {right:.2f} of cases.")


if __name__ == "__main__":
    main()
