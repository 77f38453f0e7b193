"""Tokens of a pass, and ms of a drafted token, by how many tokens a draft model scores:
``usual_tokens.py TARGET DRAFTER PROMPTS SIZE [SIZE ...]``.

PROMPTS: JSON lines, as `short_prompts.py` writes them. SIZE: a ``draft_vocab_size``; "null" is all.
Greedy, three tokens a round, 64 tokens of each text. Tokens are counted, so that other work on the
machine does not matter for them; milliseconds are medians of rounds with three drafted tokens.
"""

import json
import statistics
import sys
from collections import defaultdict

from usage import usage

from outpace import LLM, SamplingParams

usage(__doc__, needed=4)

DRAFTED, TOKENS = 3, 64
target, drafter, prompts = sys.argv[1:4]
with open(prompts) as lines:
    asked = [json.loads(line) for line in lines]
tasks = list(dict.fromkeys(each["task"] for each in asked))
print("| draft_vocab_size | a drafted token, ms | " + " | ".join(tasks) + " |")
print("|---" * (2 + len(tasks)) + "|")
for size in sys.argv[4:]:
    config = {
        "method": "draft_model",
        "model": drafter,
        "num_speculative_tokens": DRAFTED,
        "draft_vocab_size": json.loads(size),
    }
    llm = LLM(target, speculative_config=config, max_num_seqs=1, max_model_len=1024)
    passes, tokens, took = defaultdict(int), defaultdict(int), []

    def note(round_, took=took):
        if round_.proposal.counts.sum() == DRAFTED:
            took.append(1e3 * round_.seconds.draft / DRAFTED)

    with llm.engine.observing(note):
        for each in asked:
            chat = [{"role": "user", "content": each["prompt"]}]
            output = llm.chat(chat, SamplingParams(temperature=0, max_tokens=TOKENS))
            passes[each["task"]] += output.metrics.num_target_passes
            tokens[each["task"]] += output.metrics.num_emitted_tokens
    lengths = " | ".join(f"{tokens[task] / passes[task]:.2f}" for task in tasks)
    print(f"| {size} | {statistics.median(took):.1f} | {lengths} |", flush=True)
