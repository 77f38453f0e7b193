"""ms of passes of a model by tokens, and GB/s: ``block_products.py MODEL [THREADS]``.

MODEL: whatever `LLM` takes, with weights in blocks (a GGUF file, or a folder and ``int4`` after
it). The bandwidth of plain reading is measured beside it, with torch's sum over a large tensor.
"""

import statistics
import sys
import time

import torch
from usage import usage

from outpace import LLM
from outpace.targets.hf.weights import pass_bytes

usage(__doc__, needed=1)

TURNS, CONTEXT, COLUMNS, PROMPT = 15, 128, (1, 2, 4, 8, 16, 64), 1000


def reading():
    """Returns GB/s of summing up 512 MB, at best."""
    much, best = torch.zeros(1 << 27), float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        much.sum()
        best = min(best, time.perf_counter() - begin)
    return much.nbytes / best / 1e9


def milliseconds(runner, columns, cached):
    runner.admit(1)
    runner.lengths = [cached]
    begin = time.perf_counter()
    runner.forward(torch.full((1, columns), 7), keep=min(columns, 64))
    took = time.perf_counter() - begin
    runner.retain([])
    return took * 1e3


words = [word for word in sys.argv[1:] if word != "int4"]
options = {"quantization": "int4"} if "int4" in sys.argv else {}
if len(words) > 1:
    torch.set_num_threads(int(words[1]))
llm = LLM(words[0], generation_config="none", max_num_seqs=1, **options)
runner, model = llm.engine.target.runner, llm.target.model
print(llm.describe())
read = pass_bytes(model) / 1e9
print(f"{read:.2f} GB of weights a pass; plain reading gives {reading():.1f} GB/s")
print("| tokens | ms, median | at best | over 1 token | GB/s |")
first = None
for columns in COLUMNS:
    took = [milliseconds(runner, columns, CONTEXT) for _ in range(3 + TURNS)][3:]
    middle = statistics.median(took)
    first = first or middle
    print(
        f"| {columns} | {middle:.1f} | {min(took):.1f} | {middle / first:.2f} | "
        f"{read / middle * 1e3:.1f} |"
    )
runner.admit(1)
begin = time.perf_counter()
runner.prefill(0, [[7] * PROMPT])
print(f"a prompt of {PROMPT} tokens: {PROMPT / (time.perf_counter() - begin):.0f} tokens/s")
