"""ms of passes over 1 and 8 tokens after n others, and GB/s of what is cached:
``python lab/measure/long_contexts.py [HEADS KEY_HEADS SIZE LAYERS]``.

The layers are our own code's, with the attention of Qwen2.5 1.5B where nothing else is said and
with hardly anything else, so that keys and values are nearly all that a pass reads.
"""

import statistics
import sys
from time import perf_counter

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from usage import usage

from outpace.targets.cpu.kernels import speed_up
from outpace.targets.cpu.native_layers.layer import use_native_layers
from outpace.targets.cpu.native_layers.model import use_native_model
from outpace.targets.hf.runner import Runner

usage(__doc__)

SLOTS, SECONDS = (4096, 16384, 32768), 1.0
heads, groups, size, layers = map(int, sys.argv[1:]) if sys.argv[1:] else (12, 2, 128, 4)
model = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=128,
        hidden_size=heads * size,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=2 * SLOTS[-1],
    )
).eval()
speed_up(model, "native", smallest=1)
assert use_native_layers(model) == layers
assert use_native_model(model)


def passes(runner: Runner, columns: int, cached: int) -> list[float]:
    """Seconds of passes over some tokens."""
    tokens, end, found = torch.ones(1, columns, dtype=torch.long), perf_counter() + SECONDS, []
    runner.lengths = [cached]
    while perf_counter() < end or len(found) < 5:
        begin = perf_counter()
        runner.forward(tokens, keep=1)
        found.append(perf_counter() - begin)
    return found


print(f"{torch.get_num_threads()} threads")
print("| kv_cache_dtype | tokens cached | 1 token: ms | GB/s | 8 tokens: ms |")
with torch.inference_mode():
    for kind in ("auto", "int8", "fp8"):
        runner = Runner(model, rows=1, max_length=2 * SLOTS[-1], kv_cache_dtype=kind)
        runner.admit(1)
        runner.forward(torch.ones(1, 1, dtype=torch.long), keep=1)
        runner.reserve(0, [SLOTS[-1] + 8])
        for buffer in runner.cache.buffers:
            random = torch.randn(buffer.shape) if buffer.shape[-1] > 1 else torch.tensor(0.02)
            buffer.copy_(50 * random if buffer.dtype == torch.int8 else random)
        for cached in SLOTS:
            one, eight = (statistics.median(passes(runner, columns, cached)) for columns in (1, 8))
            read = runner.cache.nbytes * cached / runner.cache.capacity
            rates = f"{1e3 * one:.1f} | {read / one / 1e9:.1f} | {1e3 * eight:.1f}"
            print(f"| {kind} | {cached} | {rates} |", flush=True)
