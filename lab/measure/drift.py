"""How far int8 is from float32: ``python lab/measure/drift.py MODEL FOLDER_OF_TEXTS``."""

import math
import sys
from pathlib import Path

import torch
from usage import usage

from outpace.targets.hf.loading.load import load

usage(__doc__, needed=2)

torch.set_num_threads(1)
plain, rounded = (load(sys.argv[1], quantization=kind) for kind in (None, "int8"))
tokens, found = 0, torch.zeros(4, dtype=torch.double)
with torch.inference_mode():
    for path in sorted(Path(sys.argv[2]).glob("*.txt")):
        ids = plain.tokenizer(path.read_text()[:20000]).input_ids[:1024]
        for at in range(0, len(ids) - 255, 256):
            row = torch.tensor([ids[at : at + 256]])
            p, q = (
                each.model(input_ids=row).logits[0, :-1].double().log_softmax(-1)
                for each in (plain, rounded)
            )
            said = row[0, 1:, None]
            same = (p.argmax(-1) == q.argmax(-1)).sum()
            parts = p.gather(1, said).sum(), q.gather(1, said).sum(), (p.exp() * (p - q)).sum()
            found += torch.tensor([*parts, same], dtype=torch.double)
            tokens += len(said)
log_p, log_q, kl, same = (found / tokens).tolist()
print(f"{tokens} tokens, perplexity {math.exp(-log_p):.2f} -> {math.exp(-log_q):.2f},")
print(f"ratio {math.exp(log_p - log_q):.5f}, KL {kl:.2e} nats, top-1 agreement {same:.4f}")
