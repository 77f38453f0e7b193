"""Which models can be decoded speculatively; the others are refused when they are loaded.

`check_config` and `check` read what a model says of itself. What no configuration says (a model
that ignores its mask or its positions, without an error) is tried out by `probe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.trees.tree import Tree
from outpace.core.values import is_whole, shown
from outpace.errors import UnsupportedModel
from outpace.targets.hf import versions
from outpace.targets.hf.attention import BOOLEAN, INDEXED_LAYERS
from outpace.targets.hf.recurrent.own_states import STATES, keeps_states
from outpace.targets.hf.runner import PREFILL_CHUNK, Runner
from outpace.targets.hf.seq2seq import support as seq2seq
from outpace.targets.hf.seq2seq.lengths import is_encoder_decoder, reads_sources
from outpace.targets.hf.slots.masks import WITHOUT_MASK
from outpace.targets.hf.supported.comparing import (
    BRANCHES,
    COARSE,
    PARENTS,
    PENDING,
    PREFIX,
    distance,
    is_exact,
    tolerance_in,
)
from outpace.targets.hf.supported.plainly import read_plainly, reads_forward, some_tokens
from outpace.targets.hf.supported.reasons import remedy_for, why_it_fails, why_other_logits
from outpace.targets.hf.supported.setting import autocast_of
from outpace.targets.hf.supported.windows import INDEXED, NAMES, follows, named_span, with_span

MASKED = INDEXED_LAYERS | {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers whose masks are known."""
MASKABLE = BOOLEAN | {"eager"}

MOST_LAYERS = 2_000
"""Many times those of the largest models. transformers makes all layers before it looks for their
weights, so that a damaged number would keep it busy until memory ends."""

_ASSISTS = "it drafts for a Gemma 4, whose keys and values it reads, and writes nothing by itself"
NO_TEXT = {
    "gemma4_assistant": _ASSISTS,
    "gemma4_unified_assistant": _ASSISTS,
    "vibevoice": "it writes speech, of which it reads each piece back as an embedding, and no text",
}
"""Types of models that are no targets, and why."""


def check_type(model_type: str) -> None:
    """Raises ``UnsupportedModel`` where the type of a model alone tells that it writes no text, or
    that its code is wrong in the installed transformers."""
    if model_type in NO_TEXT:
        raise UnsupportedModel(
            f"a model of type {model_type!r} cannot be decoded speculatively, because "
            f"{NO_TEXT[model_type]}: use another model."
        )
    needed = versions.too_old_for(model_type)
    if needed is not None:
        raise UnsupportedModel(
            f"a model of type {model_type!r} cannot be decoded speculatively with transformers "
            f"{versions.INSTALLED}, whose code for it reads drafted tokens wrong: install "
            f"transformers {needed} or later."
        )


def check_config(config: Any) -> None:
    """Raises ``UnsupportedModel`` where the configuration alone tells that it cannot work."""
    check_type(config.model_type)
    text: Any = config.get_text_config()
    name = f"a model of type {config.model_type!r}"
    classes = getattr(config, "architectures", None)
    if not (classes is None or _are_names(classes)):
        raise UnsupportedModel(
            f"{name} has {shown(classes)} for the names of its classes in its config.json "
            "(architectures): download or save the model again."
        )
    layers = getattr(text, "num_hidden_layers", None)
    if layers is not None and not (is_whole(layers) and 0 < layers <= MOST_LAYERS):
        raise UnsupportedModel(
            f"{name} has {shown(layers)} layers by its config.json (num_hidden_layers): download "
            "or save the model again."
        )
    layer_types = set(getattr(text, "layer_types", None) or ())
    if reads_sources(config):
        seq2seq.check_config(config)
    _check_states(config)
    unknown = layer_types - MASKED - WITHOUT_MASK - STATES
    if unknown:
        raise UnsupportedModel(
            f"{name} has layers of type {sorted(unknown)}, for which no mask of "
            "drafted tokens is known: use a model with full or sliding attention."
        )
    if _asks_for_alibi(text):
        raise UnsupportedModel(
            f"{name} has ALiBi biases, which are the same for all rows and cannot follow the "
            "branches of a draft: use a model with rotary or learned positions."
        )


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def _check_states(config: Any) -> None:
    """Raises ``UnsupportedModel`` for an xLSTM that would take a pass to pieces, of which only the
    last one's states came back."""
    most = getattr(config, "max_inference_chunksize", None)
    if most is not None and most < PREFILL_CHUNK:
        raise UnsupportedModel(
            f"a model of type {config.model_type!r} reads at most {most} tokens at once by its "
            f"config.json (max_inference_chunksize), and passes of up to {PREFILL_CHUNK} must stay "
            f"whole for states to be taken back: set it to {PREFILL_CHUNK} or more."
        )


def _asks_for_alibi(text: Any) -> bool:
    # MPT's option is inside the options of its attention. Bloom and Falcon can be told positions.
    return bool(getattr(getattr(text, "attn_config", None), "alibi", False))


def check(model: nn.Module) -> None:
    """Raises ``UnsupportedModel`` where configuration or class tell that the model cannot work."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise UnsupportedModel(
            f"{type(model).__name__} is no model of transformers: it has no configuration. Give a "
            "model that AutoModelForCausalLM has loaded, taken out of what wraps it, or its path."
        )
    check_config(config)
    name = type(model).__name__
    if not hasattr(config.get_text_config(), "vocab_size"):
        raise UnsupportedModel(
            f"{name} has no vocabulary by its configuration, and so writes no text: use another "
            "model."
        )
    _check_writes(model)
    if is_encoder_decoder(model):
        seq2seq.check(model)
    attention = config.get_text_config()._attn_implementation
    if attention not in MASKABLE:
        raise UnsupportedModel(
            f"{name} runs {attention!r} attention, which takes no mask of drafted tokens: load it "
            "with attn_implementation='sdpa'."
        )
    window = getattr(config.get_text_config(), "sliding_window", None)
    if window is not None and not reads_forward(model):
        raise UnsupportedModel(
            f"{name} reads prompts both ways and has sliding windows, but takes no mask for each "
            "type of layer: use another model, such as PaliGemma 1."
        )


def _check_writes(model: nn.Module) -> None:
    """Raises ``UnsupportedModel`` for a model without a head that writes, or without weights."""
    loaded: Any = model
    name = type(model).__name__
    if not loaded.can_generate():
        raise UnsupportedModel(
            f"{name} has no head that writes texts, by its class: give the model's path, or load "
            "it with a class that has one, such as AutoModelForCausalLM."
        )
    if loaded.device.type == "meta":
        raise UnsupportedModel(
            f"the weights of this {name} are not in memory, but on the device 'meta': load the "
            "model with its weights."
        )


# -- trying a model out ----------------------------------------------------------------------------

_ACCEPTED = (8, 9)
_AFTER, _OTHER = 2, 5
"""So many tokens follow what was accepted, the first of them being this one."""

_SPAN = 4
"""A sliding window, chunk or number of indexed tokens that ends inside the draft, whatever the
model's own."""
_LONG_WINDOW = 256
"""Up to this a text that is longer than the window is affordable."""


def tolerance(model: nn.Module) -> float:
    """Returns how far a model's logits may be off, as `distance` measures it."""
    return tolerance_in(_computed_in(model))


def probe(model: nn.Module, coarse: bool = False) -> None:
    """Raises ``UnsupportedModel``, with the reason, unless a draft that is scored through the slot
    cache gets the logits that plain passes give.

    coarse: the layers round, so that the last bit of an input may be seen in the output.
    """
    if is_encoder_decoder(model):
        return seq2seq.probe(model, coarse)
    try:
        most = COARSE if coarse else tolerance(model)
        if _difference(model) <= most and _difference_of_rows(model) <= most:
            return
        reason, cause = why_other_logits(model), None
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever stops a model in its own forward pass
        reason, cause = why_it_fails(model, error), error
    raise UnsupportedModel(
        f"{type(model).__name__} cannot be decoded speculatively: {reason}. {remedy_for(model)}."
    ) from cause


@torch.inference_mode()
def _difference(model: nn.Module) -> float:
    """Returns how far the logits of a draft are off."""
    spans, prefix = _spans(model)
    text, nodes = some_tokens(model, prefix), some_tokens(model, len(PARENTS), first=9)
    with ExitStack() as settings:
        for name in spans:
            settings.enter_context(with_span(model, name, _SPAN))
        expected = _read_as_text(model, text, nodes)
        _check_finite(model, expected)
        scored = _score_as_draft(model, text, nodes)
    return distance(scored, expected)


@torch.inference_mode()
def _difference_of_rows(model: nn.Module) -> float:
    """Returns the same for two rows of different length in one pass."""
    texts = [some_tokens(model, 5), some_tokens(model, 3, first=9)]
    runner = Runner(model, rows=len(texts), max_length=len(texts[0]) + 1)
    runner.admit(len(texts))
    runner.prefill(0, [text[:-PENDING] for text in texts])
    tokens = torch.tensor([text[-PENDING:] for text in texts], device=runner.device)
    scored = runner.forward(tokens, keep=PENDING).logits
    read = [read_plainly(model, text)[-PENDING:] for text in texts]
    return distance(scored.double(), torch.stack(read).double())


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


def _spans(model: nn.Module) -> tuple[list[str], int]:
    """Returns the spans that can be made to end inside a short text, and how long a text to try.

    A window that the model does not read from its configuration is either no window at all or one
    that was fixed when the model was made: then only a text that is longer than it can tell.
    """
    followed, longest = [], PREFIX
    # In 16 bits rounding may well decide which tokens are picked.
    indexed = [INDEXED] if is_exact(_computed_in(model)) else []
    for name in (*NAMES, *indexed):
        span = named_span(model, name)
        if span is None:
            continue
        if follows(model, name):
            followed.append(name)
        elif span <= _LONG_WINDOW:
            longest = max(longest, min(span + 1, _positions(model, span) - len(PARENTS) - _AFTER))
    return followed, longest


def _positions(model: nn.Module, at_least: int) -> int:
    """Returns the positions that a model has, ``at_least`` where it names none."""
    loaded: Any = model
    config = loaded.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or at_least)


def _dtype(model: nn.Module) -> torch.dtype:
    loaded: Any = model
    dtype: torch.dtype = loaded.dtype
    return dtype


def _computed_in(model: nn.Module) -> torch.dtype:
    """The type that passes compute in: states are summed up in float32, whatever the weights."""
    loaded: Any = model
    dtype = autocast_of(loaded.device) or _dtype(model)
    wide = dtype == torch.float64
    return torch.float32 if wide and keeps_states(loaded.config) else dtype


def _score_as_draft(model: nn.Module, text: Sequence[int], nodes: Sequence[int]) -> Tensor:
    """Returns ``[P, V]``: the logits of the compared paths, the root before the nodes of each, and
    of what follows after one was accepted in part.

    Fewer logits are asked for than tokens are fed, as in a round after a rejected draft.
    """
    runner = Runner(model, rows=1, max_length=len(text) + len(nodes) + _AFTER)
    runner.admit(1)
    runner.prefill(0, [text[:-PENDING]])
    tree = Tree.uniform(list(PARENTS), rows=1, device=runner.device)
    tokens = torch.tensor([[*text[-PENDING:], *nodes]], device=runner.device)
    logits = runner.forward(tokens, keep=1 + len(nodes), tree=tree).logits[0]
    read = [logits[[0, *branch]] for branch in BRANCHES]
    # A part of a path is accepted, and the text goes on otherwise than it was drafted.
    runner.advance_paths(PENDING, [_ACCEPTED])
    runner.settle()
    after = torch.tensor([some_tokens(model, _AFTER, first=_OTHER)], device=runner.device)
    read.append(runner.forward(after, keep=_AFTER).logits[0])
    return torch.cat(read).double()


def _read_as_text(model: nn.Module, text: Sequence[int], nodes: Sequence[int]) -> Tensor:
    """Returns ``[P, V]``: the same from one plain pass for each path."""
    read = []
    for branch in BRANCHES:
        logits = read_plainly(model, [*text, *(nodes[node - 1] for node in branch)])
        read.append(logits[-len(branch) - 1 :])
    after = some_tokens(model, _AFTER, first=_OTHER)
    logits = read_plainly(model, [*text, *(nodes[node - 1] for node in _ACCEPTED), *after])
    read.append(logits[-_AFTER:])
    return torch.cat(read).double()
