"""Prints the 24 prompts of every speed table, as JSON lines for ``outpace bench run --chat --prompts``.

    python lab/prompts24.py MODEL DATA [--every 2] > prompts24.jsonl

Six of HumanEval (code), six of GSM8K (maths), six first turns of MT-bench (chat), three summaries of
Spec-Bench and three edits of code (from the text of the prompt). DATA: the folder of the prompt sets, as in
``--data`` (docs/benchmarking.md). MODEL: whose tokenizer counts; a prompt has at most 420 tokens, so that an
answer takes longer to write than its prompt to read. --every N keeps every N-th prompt of each task.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict

from outpace.bench.prompts import read_sets
from outpace.targets.hf.loading.reading import read_tokenizer

LONGEST = 420
TASKS = {
    "code/humaneval": ("code", 6),
    "math/gsm8k": ("maths", 6),
    "chat/mt_bench/writing": ("chat", 1),
    "chat/mt_bench/roleplay": ("chat", 1),
    "chat/mt_bench/humanities": ("chat", 2),
    "chat/mt_bench/stem": ("chat", 1),
    "chat/mt_bench/reasoning": ("chat", 1),
    "specbench/summarization": ("from the text", 3),
    "editing/rename": ("from the text", 1),
    "editing/hints": ("from the text", 1),
    "editing/bug": ("from the text", 1),
}
"""For each task of a set: what it is called in tables, and how many of its prompts are taken."""


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("model")
    ask.add_argument("data")
    ask.add_argument("--every", type=int, default=1)
    given = ask.parse_args()
    tokenizer = read_tokenizer(given.model, False)
    left = {task: count for task, (_, count) in TASKS.items()}
    found = defaultdict(list)
    for prompt in read_sets("humaneval,gsm8k,mt_bench,specbench,editing", given.data):
        messages = [{"role": "user", "content": prompt.text}]
        if left.get(prompt.task) and _length(tokenizer, messages) <= LONGEST:
            left[prompt.task] -= 1
            name = TASKS[prompt.task][0]
            found[name].append({"id": prompt.id, "task": name, "prompt": prompt.text})
    for of_task in found.values():
        for entry in of_task[:: given.every]:
            print(json.dumps(entry))


def _length(tokenizer, messages) -> int:
    made = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return len(made["input_ids"])


if __name__ == "__main__":
    main()
