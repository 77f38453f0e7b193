"""Tokens per second once other processes have gone: ``slow_phase.py MODEL DRAFT PROMPTS.jsonl [METHOD]``.

While the first two texts are written two processes keep the processors busy. The rate is that of the
next seven, of 96 tokens each: it is low where what was measured in the slow phase is still believed.
PROMPTS.jsonl: as ``lab/prompts24.py`` writes it.
"""

import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from usage import usage

from outpace import LLM, SamplingParams

usage(__doc__, needed=3)

SLOW, REST = 2, 7
model, draft, prompts, *method = sys.argv[1:]
found = [json.loads(line)["prompt"] for line in Path(prompts).read_text().splitlines()]
config = {"method": method[0] if method else "auto", "model": draft}
llm = LLM(model, speculative_config=config, max_num_seqs=1, max_model_len=2048)


def tokens(prompts: list[str]) -> int:
    """Writes texts; returns how many tokens they have."""
    greedy = SamplingParams(max_tokens=96, temperature=0)
    chats = ([{"role": "user", "content": prompt}] for prompt in prompts)
    return sum(len(llm.chat(chat, greedy).token_ids) for chat in chats)


others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
try:
    tokens(found[:SLOW])
finally:
    for each in others:
        each.kill()
        each.wait()
begin = perf_counter()
print(f"{tokens(found[SLOW : SLOW + REST]) / (perf_counter() - begin):.1f} tokens/s")
