"""The multi-token-prediction modules that some checkpoints bring along after their last layer.

They are layers of the model's own kind (with experts, latent attention and whatever it has), so
that transformers' classes hold and convert them (`transformers.modeling_layers.MtpModel`); here
they get masks, positions and slots as drafting needs them.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

from outpace.errors import UnsupportedModel
from outpace.targets.hf.kinds import older_than
from outpace.targets.hf.loading.loaded import Loaded

FULL = "full_attention"
OR_LATER = ", or install transformers 5.20 or later, which reads more of them"


@dataclass(frozen=True, eq=False)
class NextN:
    """The first module of a checkpoint, which foresees the token after the next one."""

    enorm: nn.Module
    hnorm: nn.Module
    eh_proj: nn.Module
    block: NextNBlock
    post_norm: nn.Module
    states_first: bool
    """Whether ``eh_proj`` reads the state before the embedding."""


class NextNBlock(nn.Module):
    """The decoder layer of a module, which keeps no state of its own."""

    def __init__(self, layer: nn.Module, rotary: nn.Module | None, eager: bool) -> None:
        super().__init__()
        self.layer = layer
        self._rotary = [rotary]  # the target's own: no part of this one
        self._eager = eager

    def forward(
        self, x: Tensor, positions: Tensor, before: tuple[Tensor, Tensor] | None, visible: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns the outputs ``[B, W, H]``, and the new keys and values ``[B, G, W, D]``.

        x: ``[B, W, H]``; positions: ``[B, W]``; before: keys and values ``[B, G, L, D]`` of what
        comes before; visible: ``[B, W, L + W]`` bool, what each column attends to.
        """
        slots = _Slots(before)
        rotary = self._rotary[0]
        turn = None if rotary is None else rotary(x, position_ids=positions)
        mask = visible[:, None]
        if self._eager:
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(
                ~mask, torch.finfo(x.dtype).min
            )
        found: Tensor = self.layer(
            x,
            attention_mask=mask,
            position_embeddings=turn,
            position_ids=positions,
            past_key_values=slots,
            use_cache=True,
        )
        return found, slots.new


class _Slots:
    """What a layer takes for its cache."""

    new: tuple[Tensor, Tensor]

    def __init__(self, before: tuple[Tensor, Tensor] | None) -> None:
        self._before = before

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns all keys and values, those of the new columns after the others."""
        self.new = keys, values
        if self._before is None:
            return keys, values
        return torch.cat([self._before[0], keys], 2), torch.cat([self._before[1], values], 2)


def read_nextn(loaded: Loaded) -> NextN:
    """Returns the first module in the folder of a target.

    Raises ``UnsupportedModel`` where there is none, or one of a kind that cannot be drafted with.
    """
    model: Any = loaded.model
    if not model.config.name_or_path:
        raise UnsupportedModel(
            "a model that comes from no folder brings no multi-token-prediction module: name a "
            "folder of 'outpace train mtp' as 'model'."
        )
    text = model.config.get_text_config()
    lent = copy.copy(model)  # so that nothing of the target itself is changed
    lent.config = _for_one_module(model.config, loaded.name)
    lent._keys_to_ignore_on_load_unexpected = _patterns(text.num_hidden_layers)
    try:
        found = MtpModel.from_pretrained(lent)
    except (OSError, RuntimeError, ValueError, AttributeError, StopIteration) as error:
        raise UnsupportedModel(
            f"{Path(loaded.name).name} brings no multi-token-prediction module that can be read "
            f"({' '.join(str(error).split())[:200]}): train one with 'outpace train mtp' and name "
            f"it as 'model'{OR_LATER if older_than('5.20') else ''}."
        ) from error
    part: Any = found.layers[0].to(device=loaded.device, dtype=loaded.dtype).eval()
    part.requires_grad_(False)
    eager = found.config._attn_implementation == "eager"
    block = NextNBlock(part.mtp_block, getattr(found, "rotary_emb", None), eager)
    first = bool(getattr(found.config, "mtp_hidden_states_first", False))
    norm = part.post_norm if part.post_norm is not None else nn.Identity()
    return NextN(part.enorm, part.hnorm, part.eh_proj, block, norm, first)


def in_first_module(name: str, layers: int) -> bool:
    """Returns whether the name of a weight is one of the first module, after n layers."""
    return any(re.match(pattern, name) for pattern in _patterns(layers))


def _patterns(layers: int) -> list[str]:
    """The names of the first module's weights: those of one more layer, or below ``mtp``."""
    inside = r"^(?:model\.)?(?:language_model\.)?"
    return [rf"{inside}layers\.{layers}\.", rf"{inside}mtp\.(?!layers\.[1-9])"]


def _for_one_module(config: Any, name: str) -> Any:
    """A copy of a target's configuration that asks for one module, with plain attention."""
    found = copy.deepcopy(config)
    text = found.get_text_config()
    kinds = getattr(text, "mtp_layer_types", None)
    if kinds and kinds[0] != FULL:
        raise UnsupportedModel(
            f"the multi-token-prediction module of {name} has attention of the type {kinds[0]!r}, "
            f"and only {FULL!r} can be drafted with: use another drafter."
        )
    if getattr(text, "layer_types", None) is not None:
        text.mtp_layer_types = [FULL]
    inner = getattr(text, "mlp_layer_types", None)
    if inner is not None:
        text.mtp_mlp_layer_types = (getattr(text, "mtp_mlp_layer_types", None) or inner[-1:])[:1]
    text.num_mtp_layers = 1
    eager = config._attn_implementation == "eager"
    for each in (found, text):
        each._attn_implementation = "eager" if eager else "sdpa"
    return found
