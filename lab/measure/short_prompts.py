"""Writes short prompts for ``outpace bench run --chat``: ``short_prompts.py MODEL DATA [kinds|ten|many]``.

Twenty of eight tasks, with "many" three times as many; with "kinds" 25, ten about code, five about
maths and ten of free text; with "ten" ten of these 25, four, two and four.

Where a prompt of a thousand tokens takes as long to read as the answer takes to write, a benchmark
of long ones says little about drafting. DATA: the folder of prompt sets, as ``--data``. MODEL: whose
tokenizer and chat template count; a prompt has at most 420 tokens. Prints JSON lines.
"""

import json
import sys

from usage import usage

from outpace.bench.prompts import read_sets
from outpace.targets.hf.loading.load import load

usage(__doc__, needed=2)

LONGEST = 420
TASKS = {
    "code/humaneval": ("code", 2),
    "code/mbpp": ("code", 2),
    "math/gsm8k": ("maths", 2),
    "chat/mt_bench/writing": ("chat", 1),
    "chat/mt_bench/roleplay": ("chat", 1),
    "chat/mt_bench/humanities": ("chat", 1),
    "specbench/translation": ("translation", 2),
    "specbench/summarization": ("summarisation", 1),
    "specbench/qa": ("questions", 2),
    "editing/rename": ("editing", 1),
    "editing/hints": ("editing", 1),
    "editing/bug": ("editing", 1),
    "editing/errors": ("editing", 1),
    "rag/fairytaleqa": ("questions on a text", 2),
}
KINDS = {
    "code/humaneval": ("code", 5),
    "code/mbpp": ("code", 5),
    "math/gsm8k": ("maths", 5),
    **{
        f"chat/mt_bench/{what}": ("free text", 1)
        for what in ("writing", "roleplay", "humanities", "stem", "reasoning")
    },
    "specbench/translation": ("free text", 2),
    "specbench/summarization": ("free text", 1),
    "specbench/qa": ("free text", 2),
}
"""For each task of a set: what it is called here, and how many of its prompts are taken."""

model, data = sys.argv[1:3]
tokenizer = load(model).tokenizer


def length(text):
    messages = [{"role": "user", "content": text}]
    return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


TEN = (0, 2, 6, 8, 10, 12, 15, 17, 20, 23)
"""Numbers of those of the 25."""

CHOSEN = KINDS if sys.argv[3:] in (["kinds"], ["ten"]) else TASKS
TIMES = 3 if sys.argv[3:] == ["many"] else 1
left = {task: TIMES * count for task, (_, count) in CHOSEN.items()}
found = []
for prompt in read_sets("humaneval,mbpp,gsm8k,mt_bench,specbench,editing,fairytaleqa", data):
    if left.get(prompt.task) and length(prompt.text) <= LONGEST:
        left[prompt.task] -= 1
        found.append({"id": prompt.id, "task": CHOSEN[prompt.task][0], "prompt": prompt.text})
for number, entry in enumerate(found):
    if number in TEN or sys.argv[3:] != ["ten"]:
        print(json.dumps(entry))
