"""us of the distributions of a chain's nodes under penalties: ``python lab/measure/penalties.py
[VOCABULARY ...]``."""

import statistics
import sys
import time

import torch
from usage import usage

from outpace.core.logits_pipeline import Branches, History, LogitsPipeline, RowOptions
from outpace.core.params import SamplingParams

usage(__doc__)

ROUNDS, PROMPT, OUTPUT = 60, 100, 130
OPTIONS = ({}, {"presence_penalty": 0.3, "frequency_penalty": 0.3}, {"repetition_penalty": 1.1})


def microseconds(vocabulary, nodes, options):
    torch.manual_seed(0)
    history = History([list(range(PROMPT))], [list(range(PROMPT // 2, PROMPT // 2 + OUTPUT))])
    pipeline = LogitsPipeline(
        [RowOptions(SamplingParams(temperature=0, **options).resolve({}))], vocabulary
    )
    logits = torch.randn(1, nodes, vocabulary)
    tokens = torch.randint(vocabulary, (1, nodes, nodes - 1))
    branches = Branches(tokens, torch.ones(nodes, nodes - 1).tril(-1).bool()[None])
    took = []
    for token in range(ROUNDS):
        history.outputs[0].append(token)
        begin = time.perf_counter()
        pipeline.argmax_tokens(logits, branches, history)
        took.append(time.perf_counter() - begin)
    return statistics.median(took) * 1e6


print("| vocabulary | nodes | none | presence and frequency | repetition |")
print("| --- | --- | --- | --- | --- |")
for vocabulary in map(int, sys.argv[1:] or ("8192", "151936")):
    for nodes in (1, 5):
        found = [f"{microseconds(vocabulary, nodes, each):.0f}" for each in OPTIONS]
        print(f"| {vocabulary:,} | {nodes} | {' | '.join(found)} |")
