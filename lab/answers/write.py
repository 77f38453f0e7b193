"""Lets a target answer the prompts of `prompts.py`, and goes on where it was stopped.

    python lab/answers/write.py MODEL DATA --out lab/answers/coder-1.5b [--minutes 60] [--batch 16]

Every second answer is greedy, the others are drawn at a temperature of .7 with a seed; each ends by itself or
at 512 tokens. They are kept in shards of 100, `00000.xz`, compressed JSON lines `[number, temperature,
[token ids]]`; the prompts themselves are made anew from DATA, and `about.json` says which they were. What a
run has not filled a shard with stands in `growing.jsonl`. SIGTERM and Ctrl-C lose the texts in the batch only.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prompts import Prompt, fingerprint, prompts

SHARD = 100
LONGEST = 512
TEMPERATURE = 0.7


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("model")
    ask.add_argument("data", type=Path)
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--minutes", type=float)
    ask.add_argument("--batch", type=int, default=16)
    ask.add_argument("--threads", type=int)
    given = ask.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = prompts(given.data)
    given.out.mkdir(parents=True, exist_ok=True)
    check_about(given.out, Path(given.model).name, found)
    done = recover(given.out)
    print(f"{len(found):,} prompts, {done:,} answered", flush=True)
    end = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    from outpace import LLM

    llm = LLM(
        given.model,
        speculative_config={"method": "none"},
        max_num_seqs=given.batch,
        threads=given.threads,
    )
    began, tokens = time.monotonic(), 0
    with (given.out / "growing.jsonl").open("a", encoding="utf-8") as growing:
        for number, answer in answers(llm, found, done):
            growing.write(json.dumps([number, temperature(number), answer]) + "\n")
            growing.flush()
            tokens += len(answer)
            done = number + 1
            if done % 25 == 0:
                seconds = time.monotonic() - began
                print(f"{done:,} answers, {tokens / seconds:.1f} tokens/s", flush=True)
            if done % SHARD == 0:
                keep_shard(given.out, done // SHARD - 1)
                growing.truncate(0)
            if end is not None and time.monotonic() > end:
                break


def temperature(number: int) -> float:
    return TEMPERATURE * (number % 2)


def answers(llm: Any, found: list[Prompt], done: int) -> Iterator[tuple[int, list[int]]]:
    """Yields the answers that are still missing, in order."""
    from outpace import SamplingParams
    from outpace.inputs.chats import rendered
    from outpace.targets.hf.tokenizer import tokenized

    numbers = range(done, len(found))
    asked, params = [], []
    for number in numbers:
        message = [{"role": "user", "content": found[number].text}]
        text = rendered(llm.tokenizer, "the model", message)
        asked.append(tokenized(llm.tokenizer, text, add_special_tokens=False))
        params.append(
            SamplingParams(
                temperature=temperature(number), max_tokens=LONGEST, seed=number, top_p=1.0, top_k=0
            )
        )
    for number, output in zip(numbers, llm.generate_each(asked, params), strict=True):
        yield number, list(output.outputs[0].token_ids)


def check_about(folder: Path, model: str, found: list[Prompt]) -> None:
    """Ends the program where the folder holds answers to other prompts or by another model."""
    about = {
        "model": model,
        "prompts": len(found),
        "fingerprint": fingerprint(found),
        "longest": LONGEST,
    }
    path = folder / "about.json"
    if not path.exists():
        path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    elif json.loads(path.read_text(encoding="utf-8")) != about:
        sys.exit(f"{path} tells of other answers than {about}: name another folder.")


def recover(folder: Path) -> int:
    """Returns how many answers there are; drops a line that was not written to its end."""
    shards = len(list(folder.glob("*.xz")))
    path = folder / "growing.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    whole = [line for line in whole if json.loads(line)[0] >= shards * SHARD]
    path.write_bytes(b"".join(whole))
    return shards * SHARD + len(whole)


def keep_shard(folder: Path, number: int) -> None:
    path = folder / f"{number:05}.xz"
    part = path.with_suffix(".part")
    part.write_bytes(lzma.compress((folder / "growing.jsonl").read_bytes(), preset=9))
    os.replace(part, path)


if __name__ == "__main__":
    main()
