"""Prints prompts of several lengths, as JSON lines for ``outpace bench run --chat --prompts``.

    python lab/prompts_long.py MODEL [TOKENS ...] > long.jsonl

Each is code of Python's own library, cut to each of these numbers of tokens (default: 1024, 4096, 16384, 28672), and a
question after it: one asks for a description (free writing), one for a function of it with changes
(from the text). MODEL: whose tokenizer counts. Of each length the prompts are one task, so that the
tables by task are tables by length.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

from outpace.targets.hf.loading.reading import read_tokenizer

LENGTHS = (1024, 4096, 16384, 28672)
ROOM = 96
"""Tokens of the question and of the chat template, at most."""
MODULES = "bisect heapq fractions textwrap statistics difflib argparse configparser tarfile typing"
QUESTIONS = {
    "describe": "Describe in your own words what this code is for and how its parts work together.",
    "rewrite": "Write the functions insort_right and bisect_right of this code again, with type "
    "hints.",
}


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    ask.add_argument("model")
    ask.add_argument("tokens", nargs="*", type=int, default=LENGTHS)
    given = ask.parse_args()
    tokenizer = read_tokenizer(given.model, False)
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / f"{name}.py" for name in MODULES.split()]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    ids = tokenizer(code, add_special_tokens=False).input_ids
    for length in given.tokens:
        if not ROOM < length <= len(ids):
            ask.error(f"a length is more than {ROOM}, and {len(ids)} at most.")
        begin = tokenizer.decode(ids[: length - ROOM])
        for name, question in QUESTIONS.items():
            prompt = f"{begin}\n\n{question}"
            entry = {"id": f"{name}/{length}", "task": f"{length} tokens", "prompt": prompt}
            print(json.dumps(entry))


if __name__ == "__main__":
    main()
