"""us of a sampled round's parts: ``python lab/measure/rounds.py [SPECULATIVE_CONFIG]``."""

import json
import sys
import time

import torch
from usage import usage

from outpace import LLM, SamplingParams
from outpace.draft import chains, trees
from outpace.engine import engine, verifier
from outpace.targets.hf import target

usage(__doc__)

torch.set_num_threads(1)
spent = {}


def timed(owner, name):
    inner = getattr(owner, name)

    def outer(*args, **options):
        begin = time.perf_counter()
        found = inner(*args, **options)
        spent.setdefault(f"{owner.__name__}.{name}", []).append(time.perf_counter() - begin)
        return found

    setattr(owner, name, outer)


for owner, name in (
    (engine.Engine, "_round"),
    (engine.Engine, "_score"),
    (engine.Engine, "_propose"),
    (chains.Chains, "grow"),
    (trees.Siblings, "__call__"),
    (verifier, "draw_verdict"),
    (target.HFTarget, "commit"),
):
    timed(owner, name)
config = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {"method": "draft_model"}
llm = LLM(speculative_config={"num_speculative_tokens": 5, **config})
for seed in range(4):
    if seed == 1:
        spent.clear()
    params = SamplingParams(max_tokens=64, temperature=0.8, seed=seed, ignore_eos=True)
    llm.generate("Once upon a time there was", params)
rounds = len(spent["Engine._round"])
print({name: round(sum(times) / rounds * 1e6) for name, times in spent.items()})
