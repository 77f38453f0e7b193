"""Sampled speed-ups on the bundled pair by CPU time: ``python lab/measure/sampled.py [BATCH]``."""

import statistics
import sys
import time

import torch
from usage import usage

from outpace import LLM, SamplingParams

usage(__doc__)

torch.set_num_threads(1)
batch = int(sys.argv[1]) if len(sys.argv) > 1 else 1
setups = {
    "plain": {"method": "none"},
    "chain of 5": {"method": "draft_model", "num_speculative_tokens": 5},
    "chain of 5, block": {"method": "draft_model", "num_speculative_tokens": 5, "verify": "block"},
    "tree 3, 2, 1": {"method": "draft_tree", "branching": [3, 2, 1], "num_speculative_tokens": 15},
}
models = {name: LLM(speculative_config=setup) for name, setup in setups.items()}
took = {name: [] for name in models}
for turn in range(6):
    for name, model in models.items():
        options = [
            SamplingParams(max_tokens=64, temperature=0.8, seed=100 * turn + row, ignore_eos=True)
            for row in range(batch)
        ]
        begin = time.thread_time()
        model.generate(["Once upon a time there was"] * batch, options)
        took[name].append(time.thread_time() - begin)
plain = statistics.median(took["plain"][1:])
print({name: round(plain / statistics.median(times[1:]), 2) for name, times in took.items()})
