"""Lets an EAGLE-3 head know fewer tokens, those that answers have most often: a smaller output matrix to read.

python lab/answers/trim.py HEAD ANSWERS.npz --tokens 8192 --out SMALLER
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from outpace.heads.checkpoint import load_head, save_head
from outpace.methods.heads.eagle3 import Eagle3


def main() -> None:
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ask.add_argument("head", type=Path)
    ask.add_argument("answers", type=Path)
    ask.add_argument("--tokens", type=int, required=True)
    ask.add_argument("--out", type=Path, required=True)
    given = ask.parse_args()
    head = load_head(given.head)
    assert isinstance(head, Eagle3)
    counts = np.bincount(np.load(given.answers)["tokens"], minlength=head.target.vocab_size)
    known = counts[head.d2t.numpy()]
    kept = torch.from_numpy(np.sort(np.argsort(-known, kind="stable")[: given.tokens]))
    weights = dict(head.state_dict())
    weights["d2t"] = weights["d2t"][kept]
    weights["lm_head.weight"] = weights["lm_head.weight"][kept]
    config = replace(head.config, draft_vocab_size=given.tokens)
    smaller = Eagle3(head.target, config)  # type: ignore[arg-type]
    smaller.load_state_dict(weights, assign=True)
    save_head(smaller, given.out)
    print(
        f"{counts[smaller.d2t.numpy()].sum() / counts.sum():.4f} of the answers' tokens are known"
    )


if __name__ == "__main__":
    main()
