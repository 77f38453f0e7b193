"""ms of a pass's parts by tokens scored: ``python lab/measure/parts.py MODEL [COLUMNS ...]``."""

import sys
import warnings

import torch
from torch.profiler import ProfilerActivity, profile
from usage import usage

from outpace import LLM
from outpace.core.trees.tree import Tree

usage(__doc__, needed=1)

warnings.simplefilter("ignore")
PASSES, CONTEXT = 20, 128
KINDS = {"linear": "products", "mm": "products", "scaled_dot_product": "attention"}


def kind_of(name):
    return next((kind for part, kind in KINDS.items() if part in name), "rest")


# Without our own passes, into which the profiler does not see.
llm = LLM(sys.argv[1], generation_config="none", max_num_seqs=1, cpu_kernels="packed")
runner = llm.engine.target.runner
runner.admit(1)
runner.lengths = [CONTEXT]
print("| tokens | products | attention | rest |")
for columns in map(int, sys.argv[2:] or ("1", "6")):
    tokens, tree = torch.full((1, columns), 7), Tree.chain(1, columns - 1)
    for _ in range(5):
        runner.forward(tokens, keep=columns, tree=tree)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(PASSES):
            runner.forward(tokens, keep=columns, tree=tree)
    spent = dict.fromkeys(("products", "attention", "rest"), 0.0)
    for event in found.key_averages():
        spent[kind_of(event.key)] += event.self_cpu_time_total / PASSES / 1e3
    print(f"| {columns} | {' | '.join(f'{ms:.1f}' for ms in spent.values())} |")
