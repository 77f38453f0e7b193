"""How many of a text's tokens have logits with the same bits, fed one by one and as drafts, alone
and with other texts; and what a recorded pass takes, by its rows and columns.

    python lab/measure/bits.py llama-8b

The model is random, in bfloat16. Each row of the first table compares all logits after 310 tokens
with those of the same tokens fed one at a time: in passes whose shape follows from what is fed, and
in passes that all have 8 or 16 columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from outpace.bench.model_shapes import random_model, shape_named
from outpace.core.trees.tree import Tree
from outpace.engine.capture import CudaGraphs, EagerRunner
from outpace.targets.hf.attention import use_grouped
from outpace.targets.hf.fixed import FixedShapeConfig
from outpace.targets.hf.runner import Runner

PROMPT, END = 230, 540
FED = (2, 5, 8, 13)


class Measured:
    def __init__(self, shape: str) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = random_model(
            shape_named(shape, draft_layers=1), torch.bfloat16, device, seed=0
        )
        use_grouped(self.model)
        self.device = device
        self._draws = torch.Generator().manual_seed(1)

    def text(self) -> list[int]:
        return torch.randint(
            0, self.model.config.vocab_size, (END,), generator=self._draws
        ).tolist()

    def runner(self, rows: int, columns: int) -> Runner:
        """columns: of every pass; 0: as many as are fed."""
        steps = CudaGraphs() if self.device.type == "cuda" else EagerRunner()
        fixed = FixedShapeConfig(self.model, steps, pads=True, columns=columns or None)
        return Runner(self.model, rows, 2048, fixed)

    def logits(self, runner: Runner, texts: Sequence[Sequence[int]], fed: int) -> Tensor:
        """[rows, END - PROMPT, V], with n tokens in a pass."""
        runner.reset()
        runner.admit(len(texts))
        for row, text in enumerate(texts):
            runner.prefill(row, [text[:PROMPT]])
        found = []
        for begin in range(PROMPT, END, fed):
            tokens = torch.tensor([text[begin : begin + fed] for text in texts], device=self.device)
            count = tokens.shape[1]
            tree = Tree.chain(len(texts), count - 1, self.device)
            found.append(runner.forward(tokens, keep=count, tree=tree).logits.clone())
            runner.advance([count] * len(texts))
        return torch.cat(found, 1)

    def compare(self, rows: int, columns: int) -> None:
        runner, texts = self.runner(rows, columns), [self.text() for _ in range(rows)]
        one_by_one = self.logits(runner, texts, 1)
        name = f"| {rows} | {columns or 'as fed'} |"
        for fed in (fed for fed in FED if not columns or fed <= columns):
            same = (self.logits(runner, texts, fed) == one_by_one).all(-1)
            print(f"{name} {fed} | {same.float().mean():.1%} |", flush=True)
        if rows > 1:
            others = [texts[0], *(self.text() for _ in range(rows - 1))]
            same = (self.logits(runner, others, 3)[0] == one_by_one[0]).all(-1)
            print(f"{name} 3, with others | {same.float().mean():.1%} |", flush=True)

    def milliseconds(self, rows: int, columns: int) -> float:
        runner = self.runner(rows, columns)
        runner.admit(rows)
        for row in range(rows):
            runner.prefill(row, [self.text()[:300]])
        token = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
        tree = Tree.chain(rows, 0, self.device)
        for _ in range(3):
            runner.forward(token, tree=tree, keep=1)
        self._wait()
        begin = perf_counter()
        for _ in range(30):
            runner.forward(token, tree=tree, keep=1)
        self._wait()
        return (perf_counter() - begin) / 30 * 1e3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape")
    measured = Measured(parser.parse_args().shape)
    print("| rows | columns of a pass | fed | tokens with the same bits |")
    for rows in (1, 4):
        for columns in (0, 8, 16):
            measured.compare(rows, columns)
    print("| rows | 1 column | 8 | 16 | 32 |")
    for rows in (1, 4, 16):
        times = [f"{measured.milliseconds(rows, columns):.1f}" for columns in (1, 8, 16, 32)]
        print(f"| {rows} | {' | '.join(times)} |", flush=True)


if __name__ == "__main__":
    main()
