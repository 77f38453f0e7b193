"""Compares ways to choose the layers that a small model begins with, before it learns anything.

    python lab/measure/pruned_layers.py TARGET.gguf START.gguf TEXT --layers 12

Prints how far each choice is from the target on a text: Kullback-Leibler divergence of the
distributions, and the share of places at which both find the same token likeliest. Layers are
chosen on the last 256 tokens of the text and compared on the first 1,024.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.targets.base import SubLayers
from outpace.targets.hf.gguf.load import read_dequantized
from outpace.targets.hf.loading.load import load
from outpace.targets.hf.partial.layers import skip_sublayers
from outpace.train.data import blocks, documents
from outpace.train.distill import ModelRecipe, closest_layers, subsample_batch
from outpace.train.losses import FORWARD_KL
from outpace.train.recipe import LossOutput
from outpace.train.teacher import Teacher

BLOCK, COMPARED = 256, 4


def main() -> None:
    """Makes the choices, and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", help="a GGUF file")
    parser.add_argument("start", help="a GGUF file with the same tokens")
    parser.add_argument("text", type=Path, help=".txt or .jsonl")
    parser.add_argument("--layers", type=int, required=True, help="to keep")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = load(options.target)
    model: Any = read_dequantized(options.start).eval()
    teacher = Teacher(target, (-1,), top=0)
    recipe = ModelRecipe(model, teacher, FORWARD_KL, depths=1)
    read = documents([options.text], target.tokenizer, target.name)
    tokens = blocks(read, target.tokenizer, BLOCK, BLOCK * (COMPARED + 1))
    piece, compared = subsample_batch(teacher.read(tokens[-1:])), teacher.read(tokens[:-1])
    count = model.config.num_hidden_layers

    def distance() -> float:
        return float(marked(lambda: recipe.compute_loss(piece)).loss)

    kept = {
        "evenly spaced": torch.linspace(0, count - 1, options.layers).round().int().tolist(),
        "those that change the states most": most_changing(model, tokens[-1:], options.layers),
        "left out one by one": closest_layers(model, options.layers, "it", distance, said),
    }
    for way, layers in kept.items():
        with skip_sublayers(model, SubLayers.of_layers(set(range(count)) - set(layers))):
            marks = marked(lambda: recipe.compute_loss(compared))
        same = float(marks.hits.float().mean())
        print(f"{way}: {layers}, divergence {float(marks.loss):.2f}, same token {same:.0%}")


@torch.no_grad()
def marked(mark: Callable[[], LossOutput]) -> LossOutput:
    """LossOutput without gradients."""
    return mark()


@torch.no_grad()
def most_changing(model: Any, tokens: Tensor, wanted: int) -> list[int]:
    """Returns the layers whose output points least where their input does (ShortGPT)."""
    states = model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
    alike = [
        float(torch.cosine_similarity(before, after, dim=-1).mean())
        for before, after in itertools.pairwise(states)
    ]
    return sorted(sorted(range(len(alike)), key=lambda layer: alike[layer])[:wanted])


def said(step: str, done: float) -> None:
    """Shows how far the choice is."""
    print(f"\r{step}: {done:.0%}", end="\n" if done == 1 else "", flush=True)


if __name__ == "__main__":
    main()
