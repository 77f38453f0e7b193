"""A small datastore for a target, for the gate and the contract tests."""

from __future__ import annotations

import torch

from outpace.methods.lookup.datastore import Datastore
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.plain import of_texts


def dummy_datastore(loaded: LoadedModel) -> Datastore:
    """Returns a datastore of what the target itself writes after two tokens."""
    vocabulary = loaded.vocabulary
    first = torch.arange(min(64, vocabulary), device=loaded.device)
    texts = torch.stack([first, first.flip(0)], 1)
    with torch.inference_mode():
        for _ in range(24):
            logits = loaded.model(**of_texts(loaded.model, texts), use_cache=False).logits[:, -1]
            texts = torch.cat([texts, logits[:, :vocabulary].argmax(-1, keepdim=True)], 1)
    return Datastore.of(texts.tolist(), vocabulary)
