"""Perplexity of a model on a text: ``perplexity.py MODEL TEXT [WINDOWS] [int8|int4|float]``.

The text is cut into windows of 512 tokens. What is scored is the second half of each, after the
first, as llama.cpp's own ``llama-perplexity -m MODEL -f TEXT -c 512 --chunks WINDOWS`` does it.
int8, int4: the weights are rounded so. float: weights in blocks are dequantised to floats, and
activations are not rounded.
"""

import sys
from pathlib import Path

import torch
from usage import usage

from outpace import LLM

usage(__doc__, needed=2)

WINDOW, FIRST = 512, 256
KINDS = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "float": {"cpu_kernels": "off"},
}

model, text, *rest = sys.argv[1:]
windows = next((int(word) for word in rest if word.isdigit()), 24)
options = next((KINDS[word] for word in rest if word in KINDS), {})
llm = LLM(
    model,
    speculative_config={"method": "none"},
    max_num_seqs=1,
    max_model_len=WINDOW,
    **options,
)
print(llm.describe())
ids = llm.tokenizer(Path(text).read_text()).input_ids
parts = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)[:windows]
runner, found = llm.engine.target.runner, []
for part in parts:
    runner.admit(1)
    with torch.inference_mode():
        logits = runner.forward(part[None], keep=WINDOW - FIRST).logits[0, :-1]
    runner.retain([])
    found.append(-logits.double().log_softmax(-1).gather(1, part[FIRST + 1 :, None]))
losses = torch.cat(found)
spread = losses.std() / len(losses) ** 0.5
value = losses.mean().exp()
print(
    f"perplexity {value:.3f} +/- {value * spread:.3f}, {len(losses)} tokens of {len(parts)} windows"
)
