"""Logits of passes of 1 token against passes of 6, and against float32: ``passes.py MODEL``."""

import sys

import torch
from transformers import DynamicCache
from usage import usage

from outpace.targets.cpu.weights import quantize
from outpace.targets.hf.loading.load import load

usage(__doc__, needed=1)


class OneByte(quantize.Int8Linear):
    """Activations of a single byte per token."""

    def forward(self, x):
        flat = x.reshape(-1, self.in_features)
        step = flat.abs().amax(-1, keepdim=True).clamp_min_(1e-30).div_(self.levels)
        middle = self.levels + 1
        x_bytes = (flat / step).add_(middle + 0.5).to(torch.uint8)
        y = quantize._product(x_bytes, middle, self._packed, self.scale, self.zero)
        y = y.mul_(step) if self.bias is None else y.mul_(step).add_(self.bias)
        return y.view(*x.shape[:-1], -1)


def logits(model, ids, width):
    cache, found = DynamicCache(config=model.config), []
    model(ids[:, :16], past_key_values=cache, use_cache=True)
    for at in range(16, 64, width):
        slots, columns = torch.arange(at + width), torch.arange(at, at + width)
        options = {
            "attention_mask": (slots <= columns[:, None])[None, None] if width > 1 else None,
            "position_ids": columns[None],
        }
        found.append(model(ids[:, at : at + width], past_key_values=cache, **options).logits[0])
    return torch.cat(found)


def off(a, b):
    distance = (a - b).square().mean(-1).sqrt() / a.std(-1)
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return f"mean {distance.mean():.1e}, worst {distance.max():.1e}, KL {kl:.1e}"


torch.set_num_threads(1)
torch.manual_seed(0)
plain = load(sys.argv[1]).model
models = {"float32": plain, "two halves": load(sys.argv[1], quantization="int8").model}
models["one byte"] = load(sys.argv[1], quantization="int8").model
for module in models["one byte"].modules():
    if type(module) is quantize.Int8Linear:
        module.__class__ = OneByte
sampling = {"do_sample": True, "max_new_tokens": 64, "min_new_tokens": 64, "top_k": 0}
with torch.inference_mode():
    starts = [torch.randint(0, plain.config.vocab_size, (1, 8)) for _ in range(3)]
    texts = [plain.generate(start, pad_token_id=0, **sampling)[:, :64] for start in starts]
    single = {n: torch.cat([logits(m, t, 1) for t in texts]) for n, m in models.items()}
    for name, model in models.items():
        six = torch.cat([logits(model, text, 6) for text in texts])
        print(f"{name}: 1 against 6: {off(single[name], six)}")
        print(f"{name}: from float32: {off(single['float32'], single[name])}")
