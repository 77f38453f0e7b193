"""Which models can be decoded speculatively; the others are refused when they are loaded.

`check_config` and `check` read what a model says of itself. What no configuration says (a model
that ignores its mask or its positions, without an error) is tried out by `probe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.tree import Tree
from outpace.core.values import is_whole, shown
from outpace.errors import UnsupportedModel
from outpace.targets.hf.attention import BOOLEAN
from outpace.targets.hf.masks import WITHOUT_MASK
from outpace.targets.hf.own_states import STATES, keeps_states
from outpace.targets.hf.plainly import read_plainly, some_tokens
from outpace.targets.hf.reasons import why_it_fails, why_other_logits
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.windows import follows_window, with_window

RECURRENT_MODELS = frozenset({"rwkv", "xlstm"})
"""Models whose states lie elsewhere than in transformers' cache."""
ALIBI = frozenset({"bloom"})
WINDOWED = frozenset({"full_attention", "sliding_attention"})
MASKABLE = BOOLEAN | {"eager"}


def check_config(config: Any) -> None:
    """Raises ``UnsupportedModel`` where the configuration alone tells that it cannot work."""
    text: Any = config.get_text_config()
    name = f"a model of type {config.model_type!r}"
    layers = getattr(text, "num_hidden_layers", None)
    if layers is not None and not (is_whole(layers) and layers > 0):
        raise UnsupportedModel(
            f"{name} has {shown(layers)} layers by its config.json (num_hidden_layers): download "
            "or save the model again."
        )
    layer_types = set(getattr(text, "layer_types", None) or ())
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{name} is an encoder-decoder: use a decoder-only causal language model."
        )
    _check_states(config)
    unknown = layer_types - WINDOWED - WITHOUT_MASK - STATES
    if unknown:
        raise UnsupportedModel(
            f"{name} has layers of type {sorted(unknown)}, for which no mask of "
            "drafted tokens is known: use a model with full or sliding attention."
        )
    if "local" in (getattr(text, "attention_layers", None) or ()):
        raise UnsupportedModel(
            f"{name} has local attention layers, whose windows count slots from the end of a pass: "
            "use a model with full or sliding attention."
        )
    if config.model_type in ALIBI or _asks_for_alibi(text):
        raise UnsupportedModel(
            f"{name} encodes positions as ALiBi biases over slots, not as position_ids: use a "
            "model with rotary or learned positions."
        )


def _check_states(config: Any) -> None:
    """Raises ``UnsupportedModel`` for a model with states that are nobody's but its own."""
    if config.model_type in RECURRENT_MODELS:
        raise UnsupportedModel(
            f"a model of type {config.model_type!r} keeps its recurrent state outside of "
            "transformers' cache, where it cannot be taken back to an earlier token: use a model "
            "whose state is in the cache, such as Mamba."
        )


def _asks_for_alibi(text: Any) -> bool:
    # MPT has the option inside the options of its attention.
    attention = getattr(text, "attn_config", None)
    return bool(getattr(text, "alibi", False) or getattr(attention, "alibi", False))


def check(model: nn.Module) -> None:
    """Raises ``UnsupportedModel`` where configuration or class tell that the model cannot work."""
    check_config(model.config)
    name = type(model).__name__
    config: Any = model.config
    attention = config.get_text_config()._attn_implementation
    if attention not in MASKABLE:
        raise UnsupportedModel(
            f"{name} runs {attention!r} attention, which takes no mask of drafted tokens: load it "
            "with attn_implementation='sdpa'."
        )


# -- trying a model out ----------------------------------------------------------------------------

_PREFIX = 6
"""Tokens before the draft: some that are cached first, and two that are pending."""
_PENDING = 2
_PARENTS = (0, 0, 0, 0, 0, 0, 0, 0, 8, 9)
"""A wide tree: the last of many siblings stands far from where its column would put it."""
_BRANCHES = ((1,), (8, 9, 10))
"""The paths whose nodes are compared: the first child, and the longest path."""
_ACCEPTED = (8, 9)
_AFTER, _OTHER = 2, 5
"""So many tokens follow what was accepted, the first of them being this one."""

_WINDOW = 4
"""A sliding window that ends inside the draft, whatever the model's own."""
_LONG_WINDOW = 256
"""Up to this a text that is longer than the window is affordable."""

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE = 0.15
"""In 16 bits, where a mixture of experts may even send a token to other experts."""


def probe(model: nn.Module, coarse: bool = False) -> None:
    """Raises ``UnsupportedModel``, with the reason, unless a draft that is scored through the slot
    cache gets the logits that plain passes give.

    coarse: the layers round, so that the last bit of an input may be seen in the output.
    """
    try:
        tolerance = _COARSE if coarse else _TOLERANCE.get(_computed_in(model), _COARSE)
        if _difference(model) <= tolerance:
            return
        reason, cause = why_other_logits(model), None
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever stops a model in its own forward pass
        reason, cause = why_it_fails(model), error
    raise UnsupportedModel(
        f"{type(model).__name__} cannot be decoded speculatively: {reason}. Use another model."
    ) from cause


@torch.inference_mode()
def _difference(model: nn.Module) -> float:
    """Returns how far the logits of a draft are off, in standard deviations of the plain ones."""
    setting, prefix = _with_short_window(model)
    text, nodes = some_tokens(model, prefix), some_tokens(model, len(_PARENTS), first=9)
    with setting:
        expected = _read_as_text(model, text, nodes)
        _check_finite(model, expected)
        scored = _score_as_draft(model, text, nodes)
    spread = expected.std(-1).clamp(min=1e-12)
    return float(((scored - expected).square().mean(-1).sqrt() / spread).max())


def check_numbers(model: nn.Module) -> None:
    """Raises ``UnsupportedModel`` for a model whose logits are no numbers, after one pass."""
    _check_finite(model, read_plainly(model, some_tokens(model, 1)))


def _check_finite(model: nn.Module, logits: Tensor) -> None:
    if not bool(logits.isfinite().all()):
        raise UnsupportedModel(
            f"{type(model).__name__} gives NaN or infinite logits for a plain text: its weights "
            f"are damaged, or numbers overflow in {_dtype(model)}: download the model again, or "
            "load it in a wider dtype."
        )


def _with_short_window(model: nn.Module) -> tuple[AbstractContextManager[None], int]:
    """Returns what makes a sliding window end inside a short text, and how long a text to try.

    A window that the model does not read from its configuration is either no window at all or one
    that was fixed when the model was made: then only a text that is longer than it can tell.
    """
    loaded: Any = model
    config = loaded.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is not None and follows_window(model):
        return with_window(model, _WINDOW), _PREFIX
    if window is None or window > _LONG_WINDOW:
        return nullcontext(), _PREFIX
    longest = getattr(config, "max_position_embeddings", None) or window
    return nullcontext(), max(_PREFIX, min(window + 1, longest - len(_PARENTS) - _AFTER))


def _dtype(model: nn.Module) -> torch.dtype:
    loaded: Any = model
    dtype: torch.dtype = loaded.dtype
    return dtype


def _computed_in(model: nn.Module) -> torch.dtype:
    """The type that passes compute in: states are summed up in float32, whatever the weights."""
    loaded: Any = model
    wide = _dtype(model) == torch.float64
    return torch.float32 if wide and keeps_states(loaded.config) else _dtype(model)


def _score_as_draft(model: nn.Module, text: Sequence[int], nodes: Sequence[int]) -> Tensor:
    """Returns ``[P, V]``: the logits of the compared paths, the root before the nodes of each, and
    of what follows after one was accepted in part.

    Fewer logits are asked for than tokens are fed, as in a round after a rejected draft.
    """
    runner = Runner(model, rows=1, max_length=len(text) + len(nodes) + _AFTER)
    runner.admit(1)
    runner.prefill(0, [text[:-_PENDING]])
    tree = Tree.uniform(list(_PARENTS), rows=1, device=runner.device)
    tokens = torch.tensor([[*text[-_PENDING:], *nodes]], device=runner.device)
    logits = runner.forward(tokens, keep=1 + len(nodes), tree=tree).logits[0]
    read = [logits[[0, *branch]] for branch in _BRANCHES]
    # A part of a path is accepted, and the text goes on otherwise than it was drafted.
    runner.advance_paths(_PENDING, [_ACCEPTED])
    runner.settle()
    after = torch.tensor([some_tokens(model, _AFTER, first=_OTHER)], device=runner.device)
    read.append(runner.forward(after, keep=_AFTER).logits[0])
    return torch.cat(read).double()


def _read_as_text(model: nn.Module, text: Sequence[int], nodes: Sequence[int]) -> Tensor:
    """Returns ``[P, V]``: the same from one plain pass for each path."""
    read = []
    for branch in _BRANCHES:
        logits = read_plainly(model, [*text, *(nodes[node - 1] for node in branch)])
        read.append(logits[-len(branch) - 1 :])
    after = some_tokens(model, _AFTER, first=_OTHER)
    logits = read_plainly(model, [*text, *(nodes[node - 1] for node in _ACCEPTED), *after])
    read.append(logits[-_AFTER:])
    return torch.cat(read).double()
