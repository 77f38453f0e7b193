"""ms of passes over 1, 4 and 8 tokens after 128 others, of models with recurrent layers:
``python lab/measure/hybrids.py``.

Four layers of the shape of Qwen3.5 2B and of LFM2 1.2B with random weights, rounded to 8 bits.
"""

import statistics
import tempfile
from time import perf_counter

import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from usage import usage

from outpace.targets.hf.loading.load import load
from outpace.targets.hf.runner import Runner

usage(__doc__)

TURNS, CACHED = 25, 128
SHARED = {"hidden_size": 2048, "num_hidden_layers": 4, "vocab_size": 256}
QWEN = Qwen3_5TextConfig(
    **SHARED,
    intermediate_size=6144,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)
LFM = Lfm2Config(
    **SHARED,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    layer_types=["conv", "conv", "full_attention", "conv"],
)


def ms(runner: Runner, columns: int) -> float:
    """The median time of passes over some tokens."""
    tokens, taken = torch.arange(columns)[None], []
    for _ in range(TURNS):
        begin = perf_counter()
        runner.forward(tokens, keep=columns)
        taken.append(perf_counter() - begin)
    return 1000 * statistics.median(taken)


print(f"{torch.get_num_threads()} threads\n| model | 1 token | 4 | 8 |\n|---|---|---|---|")
for name, kind, config in (
    ("Qwen3.5", Qwen3_5ForCausalLM, QWEN),
    ("LFM2", Lfm2ForCausalLM, LFM),
):
    with tempfile.TemporaryDirectory() as folder:
        kind(config).save_pretrained(folder)
        loaded = load(folder, quantization="int8")
    with torch.inference_mode():
        runner = Runner(loaded.model, 1, 2 * CACHED)
        runner.admit(1)
        runner.prefill(0, [list(range(CACHED))])
        print(f"| {name} | " + " | ".join(f"{ms(runner, n):.1f}" for n in (1, 4, 8)) + " |")
