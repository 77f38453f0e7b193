"""Seconds to read a prompt and write a token, beside llama.cpp and ik_llama.cpp:
``reading.py MODEL.gguf TEXT [TURNS [LENGTH ...]]``.

TEXT: a file whose beginnings are the prompts, of 128, 512 and 1,024 tokens where nothing else is said.
The programs take turns, in random order; a ratio (above 1: outpace is faster) is the median of
neighbours, with the lowest and the highest. ``llama-server`` is found as ``outpace bench run --vs
llamacpp`` finds it; a program that is not there is left out.
"""

import random
import statistics
import sys
import time
from pathlib import Path

import torch
from usage import usage

from outpace import LLM, SamplingParams
from outpace.bench.peers.llamacpp import IK_LLAMA_CPP, LLAMA_CPP, LlamaServer, samples
from outpace.errors import ConfigError

usage(__doc__, needed=2)

model, text, *rest = sys.argv[1:]
turns = int(rest[0]) if rest else 5
lengths = [int(length) for length in rest[1:]] or [128, 512, 1024]
room = max(lengths) + 64
llm = LLM(model, speculative_config={"method": "none"}, max_num_seqs=1, max_model_len=room)
ids = llm.tokenizer(Path(text).read_text()[: 8 * (room + turns)]).input_ids


def ours(prompt):
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))


def seconds(read, prompt):
    begin = time.perf_counter()
    read(prompt)
    return time.perf_counter() - begin


def reader(server):
    return lambda prompt: server.complete(samples(prompt, 1, 0.0, 0))


readers = {"outpace": ours}
for program in (LLAMA_CPP, IK_LLAMA_CPP):
    try:
        server = LlamaServer(program, model, None, 0, torch.get_num_threads())
    except ConfigError as fault:
        print(f"without {program.name}: {fault}", file=sys.stderr)
    else:
        readers[program.name] = reader(server)

print("| tokens | program | s | tokens/s | outpace is faster by |\n|---|---|---|---|---|")
for length in lengths:
    taken = {name: [] for name in readers}
    for turn in range(turns + 1):
        # Another beginning each time, so that nobody remembers it.
        prompt = ids[turn : turn + length]
        for name in random.sample(list(readers), len(readers)):
            taken[name].append(seconds(readers[name], prompt))
    for name, (_, *found) in taken.items():  # the first one warms up
        middle = statistics.median(found)
        ratios = [b / a for a, b in zip(taken["outpace"][1:], found, strict=True)]
        ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        print(
            f"| {length} | {name} | {middle:.2f} | {length / middle:.0f} "
            f"| {'' if name == 'outpace' else ratio} |",
            flush=True,
        )
