"""Drafted tokens that are accepted in a round, by the kind of draft, at equal numbers of nodes.

    python lab/measure/trees.py [--png docs/pictures/trees.png]

The bundled pair goes on with the built-in prompts, at temperature 0 and 0.8. Nothing is timed. The
shape of the drawn trees is the best one (`outpace.core.trees.best_shape`) for the chances that are seen
in a first run; those of the chosen ones follow the drafter's probabilities. Accepted tokens and rounds are summed
over all texts, because that is what a shape is best for: in rounds, and not in texts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from outpace import LLM, SamplingParams
from outpace.bench.builtin import BUILT_IN
from outpace.core.trees.best_shape import BestShapes
from outpace.core.trees.tree_shape import AcceptanceProbs
from outpace.policy.acceptance import Acceptance
from outpace.policy.lengths.adaptive import Constant
from outpace.tune.tree import probe

NODES = (2, 4, 8, 16, 32)
SEEDS = (1, 2, 3)
SIBLINGS = 4
KINDS: dict[str, dict[str, Any]] = {
    "chain": {"method": "draft_model"},
    "chosen nodes": {
        "method": "draft_tree",
        "branching": "dynamic",
        "top_k": SIBLINGS,
        "depth": 12,
    },
    "drawn siblings": {"method": "draft_tree"},
}
PROMPTS = [text for _, _, text in BUILT_IN]


Texts = list[tuple[int, int]]
"""Of each prompt, over its seeds: accepted tokens and rounds."""


def played(llm: LLM, temperature: float) -> Texts:
    """Writes all texts."""
    found = [(0, 0)] * len(PROMPTS)
    for seed in SEEDS if temperature else SEEDS[:1]:
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=64, ignore_eos=True)
        made = [output.outputs[0].metrics for output in llm.generate(PROMPTS, params)]
        found = [
            (accepted + each.num_accepted_tokens, rounds + each.num_target_passes)
            for (accepted, rounds), each in zip(found, made, strict=True)
        ]
    return found


def mean(texts: Texts) -> float:
    """Accepted tokens of a round."""
    return sum(accepted for accepted, _ in texts) / sum(rounds for _, rounds in texts)


def with_error(figure: Callable[[Sequence[int]], float]) -> tuple[float, float]:
    """A figure of some of the prompts, for all of them, and its standard error (jackknife)."""
    every = range(len(PROMPTS))
    without = [figure([at for at in every if at != left_out]) for left_out in every]
    count = len(PROMPTS)
    error = ((count - 1) / count * sum((x - statistics.mean(without)) ** 2 for x in without)) ** 0.5
    return figure(every), error


def seen(llm: LLM, temperature: float) -> AcceptanceProbs:
    """Returns the chances by depth and rank. Beyond 16 levels they go on as they were."""
    shape = probe(16, siblings=3)
    llm.engine.controller = Constant(shape.size, shape=shape)
    acceptance = Acceptance()
    request = acceptance.new()

    def learn(trace: Any) -> None:
        for count, decision in zip(trace.proposal.counts.tolist(), trace.outcomes, strict=True):
            acceptance.learn(request, shape.first(count).accepted_ranks(decision.path))

    with llm.engine.observing(learn):
        played(llm, temperature)
    return acceptance.typical(max(NODES), SIBLINGS)


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


def measured(models: dict[str, LLM], temperature: float) -> dict[str, list[tuple[float, float]]]:
    """Prints the rows of a temperature; returns the figures of each kind by the number of nodes."""
    chances = seen(models["drawn siblings"], temperature)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for nodes in NODES:
        shape = BestShapes(nodes, len(chances), chances).shape(nodes)
        texts: dict[str, Texts] = {}
        for name, llm in models.items():
            if name == "drawn siblings" and shape.is_chain:
                texts[name] = texts["chain"]
                continue
            own = shape if name == "drawn siblings" else None
            llm.engine.controller = Constant(nodes, shape=own)
            texts[name] = played(llm, temperature)
        cells = []
        for name, each in texts.items():
            found[name].append(with_error(lambda some: mean([each[at] for at in some])))
            cells.append("{:.2f} ± {:.2f}".format(*found[name][-1]))
        more, error = with_error(
            lambda some: (
                mean([texts["drawn siblings"][at] for at in some])
                - mean([texts["chain"][at] for at in some])
            )
        )
        cells.append("the same" if shape.is_chain else f"{more:+.2f} ± {error:.2f}")
        cells.append("chain" if shape.is_chain else ", ".join(str(len(x)) for x in shape.levels))
        print(f"| {temperature} | {nodes} | " + " | ".join(cells) + " |", flush=True)
    return found


def draw(figures: dict[float, dict[str, list[tuple[float, float]]]], path: Path) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(figures), figsize=(8, 3.2), sharey=True)
    for axis, (temperature, kinds) in zip(axes, figures.items(), strict=True):
        for marker, (name, values) in zip("os^", kinds.items(), strict=True):
            means, errors = zip(*values, strict=True)
            axis.errorbar(NODES, means, errors, label=name, marker=marker, capsize=2)
        axis.set_xscale("log", base=2)
        axis.set_xticks(NODES, [str(nodes) for nodes in NODES])
        axis.set_title(f"temperature {temperature:g}", fontsize=10)
        axis.set_xlabel("drafted nodes")
    axes[0].set_ylabel("accepted tokens of a round")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--png", type=Path, help="the picture to write")
    options = parser.parse_args()
    models = {
        name: LLM(speculative_config=config, max_num_seqs=len(PROMPTS))
        for name, config in KINDS.items()
    }
    print("| temperature | nodes | " + " | ".join(KINDS) + " | drawn less chain | shape |")
    print("|---|---|" + "---|" * (len(KINDS) + 2))
    figures = {temperature: measured(models, temperature) for temperature in (0.0, 0.8)}
    probable, right = calibration(models["chain"])
    print(f"The likeliest token: probability {probable:.2f}, the target's in {right:.2f} of cases.")
    if options.png:
        draw(figures, options.png)


if __name__ == "__main__":
    main()
