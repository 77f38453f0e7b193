"""Seconds to read a prompt and write a token, beside llama.cpp: ``reading.py MODEL.gguf TEXT [TURNS]``.

TEXT: a file whose beginnings are the prompts. Both programs take turns, in random order; the ratio
(above 1: outpace is faster) is the median of neighbours, with the lowest and the highest.
``llama-server`` is found as ``outpace bench run --vs llamacpp`` finds it.
"""

import random
import statistics
import sys
import time
from pathlib import Path

import torch
from usage import usage

from outpace import LLM, SamplingParams
from outpace.bench.peers.llamacpp import LLAMA_CPP, LlamaServer, samples

usage(__doc__, needed=2)

LENGTHS = (100, 300, 1000)

model, text, *rest = sys.argv[1:]
turns = int(rest[0]) if rest else 5
llm = LLM(model, speculative_config={"method": "none"}, max_num_seqs=1, max_model_len=4096)
server = LlamaServer(LLAMA_CPP, model, None, 0, torch.get_num_threads())
ids = llm.tokenizer(Path(text).read_text()[:40_000]).input_ids


def ours(prompt):
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))


def theirs(prompt):
    server.complete(samples(prompt, 1, 0.0, 0))


def seconds(program, prompt):
    begin = time.perf_counter()
    program(prompt)
    return time.perf_counter() - begin


print("| tokens | outpace, s | llama.cpp, s | ratio |\n|---|---|---|---|")
for length in LENGTHS:
    found = {ours: [], theirs: []}
    for turn in range(turns + 1):
        # Another beginning each time, so that nobody remembers it.
        prompt = ids[turn : turn + length]
        taken = {program: seconds(program, prompt) for program in random.sample([ours, theirs], 2)}
        if turn:  # the first one warms up
            for program, value in taken.items():
                found[program].append(value)
    ratios = [b / a for a, b in zip(found[ours], found[theirs], strict=True)]
    low, high = min(ratios), max(ratios)
    print(
        f"| {length} | {statistics.median(found[ours]):.2f} | {statistics.median(found[theirs]):.2f} "
        f"| {statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}] |"
    )
