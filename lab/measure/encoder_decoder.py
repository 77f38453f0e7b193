"""Tokens per second of an encoder-decoder of 238 million random weights, with and without drafts.

``python lab/measure/encoder_decoder.py [FOLDER]``: a T5 in float32, loaded from a folder as any
other, and a drafter that is its first layers. The later layers of the target add little, so that
the drafter agrees nearly always: this measures what rounds cost, not how good drafts are.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from usage import usage

from outpace import LLM, SamplingParams

usage(__doc__)

SOURCE, LENGTH, TURNS, FIRST = 96, 24, 3, 2
WAYS = {"plain": "off", "2 tokens a round": 2, "5 tokens a round": 5}
SIZES = dict(
    vocab_size=32128, d_model=1024, d_kv=64, d_ff=4096, num_heads=16, decoder_start_token_id=0,
    pad_token_id=0, eos_token_id=None, tie_word_embeddings=False,
)  # fmt: skip


def t5(layers):
    config = transformers.T5Config(**SIZES, num_layers=layers, num_decoder_layers=layers)
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config).eval()


def number(name):
    return int(name.split(".block.")[1].split(".")[0]) if ".block." in name else 0


def saved(folder):
    target = t5(7)
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if name.endswith((".o.weight", ".wo.weight")):
                weight.mul_(0.02 if number(name) >= FIRST else 4)
    drafter = t5(FIRST)
    known = target.state_dict()
    drafter.load_state_dict({name: known[name] for name in drafter.state_dict()})
    target.save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    print(f"{sum(w.numel() for w in target.parameters()) / 1e6:.0f} million weights")


folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
folder.mkdir(parents=True, exist_ok=True)
known = (folder / "target").exists()
if not known:
    saved(folder)
source = [(7 * at * at + 11) % 32000 + 1 for at in range(SOURCE)]
drafting = {"method": "draft_model", "model": str(folder / "drafter")}
llm = LLM(
    folder / "target",
    speculative_config={**drafting, "num_speculative_tokens": 5},
    max_num_seqs=1,
    max_model_len=256,
)
print(llm.describe())
took = {name: [] for name in WAYS}
for turn in range(1 + TURNS):  # the first one is for whatever is made on the way
    texts = {}
    for name, speculative in WAYS.items():
        params = SamplingParams(temperature=0, max_tokens=LENGTH, speculative=speculative)
        begin = time.perf_counter()
        texts[name] = llm.generate(source, params)[0]
        took[name] += [time.perf_counter() - begin] if turn else []
    print(
        {name: [round(LENGTH / seconds, 1) for seconds in took[name]] for name in took}, flush=True
    )
    assert len({tuple(output.token_ids) for output in texts.values()}) == 1
for name, times in took.items():
    metrics = texts[name].metrics
    kept = f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafted tokens accepted"
    print(f"{name}: {LENGTH / statistics.median(times):.1f} tokens/s, {kept}")
