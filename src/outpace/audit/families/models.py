"""Tiny random models in float64, on which equal texts are no luck.

float64, because in narrower types one argmax in some dozens differs between a batched and a
single pass. Weights are scaled up so that the argmax varies from token to token, which with the
usual initialisation it does not.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from outpace.audit.families.exceptions import DECODERS
from outpace.audit.families.images import concerns_dtype
from outpace.audit.families.listing import Family, Kind
from outpace.audit.families.prompts import prompts_for
from outpace.audit.families.shrink import tiny_config

SCALE = 6.0
OWN_SCALE = ("A_log", "conv")
"""Weights that random initialisation leaves at a useful size: decays, and short convolutions."""
EXACT = (torch.float64, torch.float32)
"""Types to try: some models compute parts in float32, and stumble over wider weights."""


def tiny_model(
    one: Family, seed: int = 1, scale: float = SCALE, device: str | torch.device = "cpu"
) -> Any:
    """Returns a random model of a family, in the widest type that it can compute in.

    Its weights are the same on every device. Raises what its class raises where no model can be
    made.
    """
    kind, config = getattr(transformers, one.model), tiny_config(one.family)
    config = getattr(config, DECODERS.get(one.family, ""), config)
    if not isinstance(config, kind.config_class):
        parts = [part for part in vars(config).values() if isinstance(part, kind.config_class)]
        config = parts[0] if parts else config
    for dtype in EXACT:
        model = random_model(config, kind, seed, scale, dtype=dtype).to(device)
        if _computes(model, one.kind):
            break
    return model


def _computes(model: Any, kind: Kind) -> bool:
    """Whether a model takes the dtype that it was made in. Other errors say nothing of that."""
    try:
        with torch.inference_mode():
            model(**prompts_for(model, kind)[0].arguments(model.device))
    except Exception as error:  # whoever uses the model meets it again, and says so
        return not concerns_dtype(error)
    return True


def random_model(
    config: Any,
    kind: Any = transformers.AutoModelForCausalLM,
    seed: int = 1,
    scale: float = SCALE,
    attention: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """Returns a model whose weights depend on the configuration and the seed only.

    kind: a model's class, or one of transformers' automatic ones. attention: its kernel; unset:
    the one that outpace would load the model with.
    """
    make = getattr(kind, "_from_config", None) or kind.from_config
    text = config.get_text_config(decoder=True)
    if attention is None and getattr(text, "attn_logit_softcapping", None):
        attention = "eager"  # the only kernel with the soft cap
    torch.manual_seed(seed)
    # The grouped kernels of the mixtures of experts know no float64.
    options = {"attn_implementation": attention, "experts_implementation": "eager"}
    model = make(config, dtype=dtype, **options).eval()
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if weight.dim() > 1 and not any(own in part for own in OWN_SCALE):
                if not weight.any():  # Gemma 3 would see nothing
                    weight.normal_(std=0.02)
                weight.mul_(scale)
    return model


def noised(model: Any, noise: float, seed: int = 2) -> Any:
    """Returns a copy whose weights are off by ``noise`` of their spread: a drafter that is right
    some of the time."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            spread = weight.std() if weight.dim() > 1 else 0.1
            error = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.add_(noise * spread * error.to(weight.device))
    return other
