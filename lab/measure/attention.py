"""us of attention over T queries with grouped key heads: ``python lab/measure/attention.py``."""

import statistics
import time

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from usage import usage

from outpace.targets.hf.attention import grouped_attention

usage(__doc__)

torch.set_num_threads(1)
print("| heads, key heads, cached | queries | transformers | grouped |")
with torch.inference_mode():
    for heads, groups, cached in ((16, 8, 200), (16, 8, 2048), (32, 8, 2048)):
        module = nn.Module()
        module.num_key_value_groups, module.is_causal = heads // groups, True
        buffer = torch.randn(2, 1, groups, 4096, 64)
        key, value = buffer[:, :, :, :cached]
        for queries in (1, 6, 12):
            query = torch.randn(1, queries, heads, 64).transpose(1, 2)
            mask = torch.rand(1, 1, queries, cached) > 0.05
            took = {sdpa_attention_forward: [], grouped_attention: []}
            for _ in range(25):
                for attend, times in took.items():
                    begin = time.thread_time()
                    attend(module, query, key, value, mask, scaling=0.125)
                    times.append(time.thread_time() - begin)
            medians = [f"{statistics.median(times) * 1e6:.0f}" for times in took.values()]
            print(f"| {heads}, {groups}, {cached} | {queries} | {' | '.join(medians)} |")
