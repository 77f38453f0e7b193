"""Tokens/s on a busy machine, in turns: plain decoding, "auto", and five drafted tokens.

``python lab/measure/busy_auto.py [PROCESSES] [SECONDS] [METHOD...]``: starts n processes that
only compute. Methods: the bundled draft model and look-ups by name.
"""

import subprocess
import sys
import time

from usage import usage

from outpace import LLM, SamplingParams

usage(__doc__)

PROMPTS = ["Once upon a time", "Tom had a red ball.", "The cat sat by the door and"]
others = [
    subprocess.Popen([sys.executable, "-c", "while True: pass"])
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
]
try:
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    engines = {"draft_model": LLM()}
    for name in sys.argv[3:]:
        engines[name] = LLM(speculative_config={"method": name})
    ways = {"plain": (engines["draft_model"], "off"), "K=5": (engines["draft_model"], 5)}
    ways |= {f"auto, {name}": (llm, "auto") for name, llm in engines.items()}
    tokens, took = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
    end, turn = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        for name, (llm, speculative) in ways.items():
            params = SamplingParams(
                temperature=0, max_tokens=96, ignore_eos=True, speculative=speculative
            )
            begin = time.perf_counter()
            made = llm.generate(PROMPTS[turn % len(PROMPTS)], params)[0].token_ids
            if turn:  # the first turn warms up
                took[name] += time.perf_counter() - begin
                tokens[name] += len(made)
        turn += 1
    plain = tokens["plain"] / took["plain"]
    for name in ways:
        rate = tokens[name] / took[name]
        print(f"{name:24s} {rate:7.1f} tokens/s  {rate / plain:.3f} of plain  ({turn} turns)")
finally:
    for each in others:
        each.kill()
