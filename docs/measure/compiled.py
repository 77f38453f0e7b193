"""ms of a pass by tokens scored, eager and compiled: ``python docs/measure/compiled.py MODEL``."""

import statistics
import sys
import time

import torch

from outpace import LLM
from outpace.core.tree import Tree

CONTEXT, TURNS = 128, 15


def milliseconds(llm, columns):
    runner = llm.engine.target
    runner.admit(1)
    runner.lengths = [CONTEXT]
    tokens, tree = torch.full((1, columns), 7), Tree.chain(1, columns - 1)
    begin = time.perf_counter()
    runner.forward(tokens, keep=columns, tree=tree)
    took = time.perf_counter() - begin
    runner.retain([])
    return took * 1e3


options = {"generation_config": "none", "max_num_seqs": 1}
kinds = {on: LLM(sys.argv[1], compile=on, **options) for on in (False, True)}
print(f"compiled in {kinds[True].compile_seconds:.1f} s")
print("| tokens | eager | compiled |")
for columns in (1, 2, 4, 6, 8, 12):
    took = {on: [] for on in kinds}
    for _ in range(3 + TURNS):
        for on, llm in kinds.items():
            took[on].append(milliseconds(llm, columns))
    medians = [f"{statistics.median(times[3:]):.1f}" for times in took.values()]
    print(f"| {columns} | {' | '.join(medians)} |")
