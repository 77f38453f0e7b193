"""Tokens/s while other processes are busy, with and without fewer threads for that.

``python docs/measure/busy.py [PROCESSES] [MODEL]``: starts so many processes that only compute, and
decodes plainly with one thread and with one per processor.
"""

import subprocess
import sys
import time

import torch

from outpace import LLM, SamplingParams
from outpace.targets.cpu.contention import ThreadLimit
from outpace.targets.cpu.native import native
from outpace.targets.cpu.threads import processors

TOKENS = 64


class NoLimit:
    def threads(self, wanted):
        return wanted


others = [
    subprocess.Popen([sys.executable, "-c", "while True: pass"])
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
]
try:
    llm = LLM(sys.argv[2] if len(sys.argv) > 2 else None)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, speculative="off")
    for count in (1, processors()):
        for name, limit in (("as many as asked for", NoLimit()), ("limited", ThreadLimit())):
            torch.set_num_threads(count)
            native()._limit = limit
            llm.generate("Once upon a time", params)
            begin = time.perf_counter()
            llm.generate("Once upon a time", params)
            print(f"{count} threads, {name}: {TOKENS / (time.perf_counter() - begin):.0f} tokens/s")
finally:
    for each in others:
        each.kill()
