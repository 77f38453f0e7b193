"""ms of a pass by tokens scored: ``passes_ms.py MODEL [KERNELS | compiled | int8 ...]``."""

import statistics
import sys
import time

import torch
from usage import usage

from outpace import LLM
from outpace.core.trees.tree import Tree

usage(__doc__, needed=1)

CONTEXT, TURNS, COLUMNS = 128, 15, (1, 2, 4, 6, 8, 12)
HOW = {"compiled": {"compile": True}, "int8": {"quantization": "int8"}}


def milliseconds(llm, columns):
    runner = llm.engine.target.runner
    runner.admit(1)
    runner.lengths = [CONTEXT]
    tokens, tree = torch.full((1, columns), 7), Tree.chain(1, columns - 1)
    begin = time.perf_counter()
    runner.forward(tokens, keep=columns, tree=tree)
    took = time.perf_counter() - begin
    runner.retain([])
    return took * 1e3


options = {"generation_config": "none", "max_num_seqs": 1}
names = sys.argv[2:] or ["off", "packed", "native"]
llms = {}
for name in names:
    how = HOW.get(name, {"cpu_kernels": name})
    llms[name] = LLM(sys.argv[1], **how, **options)
    print(f"{name}: {llms[name].compile_seconds:.1f} s of compiling")
print("| tokens |", " | ".join(llms), "|")
for columns in COLUMNS:
    took = {name: [] for name in llms}
    for _ in range(3 + TURNS):
        for name, llm in llms.items():
            took[name].append(milliseconds(llm, columns))
    medians = [f"{statistics.median(times[3:]):.1f}" for times in took.values()]
    print(f"| {columns} | {' | '.join(medians)} |")
