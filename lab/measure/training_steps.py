"""Seconds of a training step in float32 and in bfloat16, in turns: ``training_steps.py MODEL TEXT``.

MODEL: the target, a GGUF file or folder. TEXT: a file of some ten thousand characters. What the
target makes of the text is kept, so that its passes do not count.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from usage import usage

from outpace.targets.hf.loading.load import load
from outpace.train.run import TrainingRun
from outpace.train.settings import TrainSettings
from outpace.train.state_cache import HiddenStateCache
from outpace.train.teacher import signature_of

usage(__doc__, needed=2)

BLOCK, BLOCKS, FIRST, STEPS = 256, 8, 4, 12
FEW = {"depths": 4, "draft_vocab_size": 4096}
HEADS = {
    "medusa": (2, FEW),
    "eagle3": (1, FEW),
    "dflash": (2, {**FEW, "layers": 2}),
    "mlp_speculator": (2, {**FEW, "inner_size": 512}),
    "draft_model": (1, {"depths": 4, "layers": 2}),
}


def seconds(run, step):
    begin = time.perf_counter()
    run.learn(step)
    return time.perf_counter() - begin


target = load(sys.argv[1])
ids = target.tokenizer(Path(sys.argv[2]).read_text())["input_ids"][: BLOCK * BLOCKS]
text = torch.tensor(ids).view(BLOCKS, BLOCK)
print("| drafter | tokens of a step | float32, s | bfloat16, s | ratio |\n|---|---|---|---|---|")
with tempfile.TemporaryDirectory() as folder:
    hidden_states = HiddenStateCache(Path(folder) / "hidden-states", signature_of(target), 10**9)
    for method, (batch, head) in HEADS.items():
        given = {"method": method, "steps": 100, "batch": batch, "held_out": 0.2, "head": head}
        runs = [
            TrainingRun(
                target,
                text,
                TrainSettings(precision=precision, **given),
                Path(folder) / method / precision,
                state_cache=hidden_states,
            )
            for precision in ("float32", "bfloat16")
        ]
        took = [[seconds(run, step) for run in runs] for step in range(STEPS)][FIRST:]
        whole, half = (statistics.median(column) for column in zip(*took, strict=True))
        ratio = statistics.median(one / other for one, other in took)
        print(f"| `{method}` | {batch * BLOCK} | {whole:.2f} | {half:.2f} | {ratio:.2f} |")
