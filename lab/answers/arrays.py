"""Prompts and answers as arrays, for the scripts that run on a GPU.

python lab/answers/arrays.py prompts MODEL DATA --out PROMPTS.npz     tokens of all prompts, in the chat template
python lab/answers/arrays.py shards ANSWERS.npz --out FOLDER          what a GPU answered, as `write.py` keeps it
python lab/answers/arrays.py answers FOLDER --out ANSWERS.npz         and back
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np
from prompts import prompts
from write import SHARD, temperature


def tokens_of_prompts(model: str, data: Path, out: Path) -> None:
    from outpace import LLM
    from outpace.inputs.chats import rendered
    from outpace.targets.hf.tokenizer import tokenized

    tokenizer = LLM(model, speculative_config={"method": "none"}).tokenizer
    found = prompts(data)
    texts = [
        rendered(tokenizer, "the model", [{"role": "user", "content": prompt.text}])
        for prompt in found
    ]
    tokens = [tokenized(tokenizer, text, add_special_tokens=False) for text in texts]
    np.savez_compressed(out, **arrays(tokens), kinds=np.array([prompt.kind for prompt in found]))


def arrays(texts: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    return {
        "lengths": np.array([len(text) for text in texts], dtype=np.int32),
        "tokens": np.concatenate([np.array(text, dtype=np.int32) for text in texts]),
    }


def texts_in(held: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Returns the texts of such arrays."""
    return np.split(held["tokens"], np.cumsum(held["lengths"])[:-1])


def to_shards(answers: Path, out: Path) -> None:
    """Writes shards of 100 answers; a whole shard that is there already stays, and those after the
    last one go to `growing.jsonl`. What is after a missing answer is left out."""
    held = np.load(answers)
    found = {
        int(number): text.tolist()
        for number, text in zip(held["numbers"], texts_in(held), strict=True)
    }
    out.mkdir(parents=True, exist_ok=True)
    for begin in range(0, max(found) + 1, SHARD):
        path = out / f"{begin // SHARD:05}.xz"
        if path.exists():
            continue
        numbers = list(takewhile(found.__contains__, range(begin, begin + SHARD)))
        lines = "".join(json.dumps([at, temperature(at), found[at]]) + "\n" for at in numbers)
        if len(numbers) == SHARD:
            path.write_bytes(lzma.compress(lines.encode(), preset=9))
            continue
        (out / "growing.jsonl").write_text(lines, encoding="utf-8")
        if max(found) >= begin + len(numbers):
            print(f"answer {begin + len(numbers)} is missing: those after it are left out")
        break


def from_shards(folder: Path, out: Path) -> None:
    lines = [
        json.loads(line)
        for path in sorted(folder.glob("*.xz"))
        for line in lzma.decompress(path.read_bytes()).splitlines()
    ]
    growing = folder / "growing.jsonl"
    if growing.exists():
        lines += [json.loads(line) for line in growing.read_text(encoding="utf-8").splitlines()]
    np.savez(
        out,
        numbers=np.array([line[0] for line in lines], dtype=np.int32),
        **arrays([line[2] for line in lines]),
    )


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = ask.add_subparsers(dest="verb", required=True)
    for verb, given in (
        ("prompts", ("model", "data")),
        ("shards", ("source",)),
        ("answers", ("source",)),
    ):
        one = verbs.add_parser(verb)
        for name in given:
            one.add_argument(name, type=str if name == "model" else Path)
        one.add_argument("--out", type=Path, required=True)
    given = ask.parse_args()
    if given.verb == "prompts":
        tokens_of_prompts(given.model, given.data, given.out)
    else:
        (to_shards if given.verb == "shards" else from_shards)(given.source, given.out)


if __name__ == "__main__":
    main()
