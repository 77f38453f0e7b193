"""Tokens/s while other processes are busy, with and without fewer threads for that.

``python lab/measure/busy.py [PROCESSES] [MODEL]``: starts n processes that only compute, and
decodes with one thread and with one per processor, plainly and with five drafted tokens.
"""

import subprocess
import sys
import time
from contextlib import nullcontext

from usage import usage

from outpace import LLM, SamplingParams
from outpace.targets.cpu.threads import processors

usage(__doc__)

TOKENS, RUNS = 96, 6
WAYS = {"plain": "off", "5 drafted": 5}

others = [
    subprocess.Popen([sys.executable, "-c", "while True: pass"])
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
]
try:
    for count in (1, processors()):
        llm = LLM(sys.argv[2] if len(sys.argv) > 2 else None, threads=count)
        for name in ("limited", "as many as asked for"):
            if name != "limited":
                llm.engine.target.step_context = nullcontext
            for way, speculative in WAYS.items():
                params = SamplingParams(
                    temperature=0, max_tokens=TOKENS, ignore_eos=True, speculative=speculative
                )
                llm.generate("Once upon a time", params)
                begin = time.perf_counter()
                for _ in range(RUNS):
                    llm.generate("Once upon a time", params)
                rate = RUNS * TOKENS / (time.perf_counter() - begin)
                print(f"{count} threads, {name}, {way}: {rate:.0f} tokens/s", flush=True)
finally:
    for each in others:
        each.kill()
