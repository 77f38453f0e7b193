"""Leviathan's and BiLD's own setting, a pair of T5s: which texts differ, and by how much.

``python lab/measure/bild_t5.py``: tiny random models in float64, the smaller one a copy with noise
on its weights. It says what the thresholds do, not how good the texts of trained models are.
"""

import copy
import random

import torch
import transformers
from usage import usage

from outpace import LLM, SamplingParams

usage(__doc__)

SOURCES, LENGTH, DRAFTED, VOCABULARY = 48, 24, 4, 64

torch.set_num_threads(1)
torch.manual_seed(6)
config = transformers.UMT5Config(
    vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2,
    num_heads=4, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    tie_word_embeddings=False,
)  # fmt: skip
target = transformers.UMT5ForConditionalGeneration(config).double().eval()
with torch.no_grad():
    for name, weight in target.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0, 2 if "relative" in name else 0.2)
    target.lm_head.weight.mul_(5)
    drafter = copy.deepcopy(target)
    for weight in drafter.parameters():
        if weight.dim() > 1:
            weight.add_(0.5 * weight.std() * torch.randn_like(weight))
choose = random.Random(1)
sources = [[choose.randrange(1, VOCABULARY) for _ in range(12)] for _ in range(SOURCES)]


def written(verify):
    config = {"method": "none"}
    if verify is not None:
        config = {"method": "draft_model", "model": drafter, "num_speculative_tokens": DRAFTED}
        config["verify"] = verify
    llm = LLM(target, speculative_config=config, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    outputs = llm.generate(sources, params)
    passes = sum(output.metrics.num_target_passes for output in outputs)
    return [output.token_ids for output in outputs], SOURCES * LENGTH / passes


@torch.inference_mode()
def surprise(texts):
    """Nats per token under the target."""
    fed = torch.tensor([[0, *text] for text in texts])
    probs = target(torch.tensor(sources), decoder_input_ids=fed[:, :-1]).logits.log_softmax(-1)
    return float(-probs.gather(2, fed[:, 1:, None]).mean())


def differing(texts, others):
    changed = [text != other for text, other in zip(texts, others, strict=True)]
    firsts = [
        next(at for at in range(LENGTH) if text[at] != other[at])
        for text, other in zip(texts, others, strict=True)
        if text != other
    ]
    first = f"{sum(firsts) / len(firsts):.1f}" if firsts else ""
    return f"{100 * sum(changed) / SOURCES:.0f} % | {first}"


plain, _ = written(None)
print("| rule | tokens per pass | texts that differ | first difference at | nats per token |")
print("|---|---|---|---|---|")
print(f"| plain greedy | 1.00 | | | {surprise(plain):.3f} |")
texts, speed = written("token")
print(f"| token (lossless) | {speed:.2f} | {differing(texts, plain)} | {surprise(texts):.3f} |")
for fallback in (0.0, 0.6):
    for rollback in (0.0, 1.0, 2.0, 4.0):
        rule = {"name": "bild", "rollback": rollback, "fallback": fallback}
        texts, speed = written(rule)
        print(
            f"| bild, rollback {rollback:g}, fallback {fallback:g} | {speed:.2f} "
            f"| {differing(texts, plain)} | {surprise(texts):.3f} |"
        )
