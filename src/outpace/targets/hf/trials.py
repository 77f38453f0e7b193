"""Tries models out: whether drafts that are scored through the slot cache get the logits of plain
passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.trees.tree import Tree
from outpace.errors import UnsupportedModel
from outpace.targets.hf.distance import (
    COARSE,
    PENDING,
    PREFIX,
    TRIAL_PARENTS,
    TRIAL_PATHS,
    distance,
    is_exact,
    tolerance_in,
)
from outpace.targets.hf.kinds import is_encoder_decoder
from outpace.targets.hf.masks import INDEXED, NAMES, follows, named_span, with_span
from outpace.targets.hf.model_snapshot import autocast_of
from outpace.targets.hf.plain import dummy_tokens, forward_uncached, quantizes_inputs
from outpace.targets.hf.recurrent.families import has_recurrent_states
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.seq2seq.trials import probe_encoder_decoder
from outpace.targets.hf.trial_reasons import remedy_for, why_it_fails, why_other_logits

_ACCEPTED = (8, 9)
_AFTER, _OTHER = 2, 5
"""Tokens that follow what was accepted, the first of them being this one."""

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
        return probe_encoder_decoder(model, coarse)
    try:
        most = COARSE if coarse and not quantizes_inputs(model) else tolerance(model)
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
    text, nodes = dummy_tokens(model, prefix), dummy_tokens(model, len(TRIAL_PARENTS), first=9)
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
    texts = [dummy_tokens(model, 5), dummy_tokens(model, 3, first=9)]
    runner = Runner(model, rows=len(texts), max_length=len(texts[0]) + 1)
    runner.admit(len(texts))
    runner.prefill(0, [text[:-PENDING] for text in texts])
    tokens = torch.tensor([text[-PENDING:] for text in texts], device=runner.device)
    scored = runner.forward(tokens, keep=PENDING).logits
    reader = _reader(model)
    read = [reader(text)[-PENDING:] for text in texts]
    return distance(scored.double(), torch.stack(read).double())


def check_numbers(model: nn.Module) -> None:
    """Raises ``UnsupportedModel`` for a model whose logits are no numbers, after one pass."""
    _check_finite(model, forward_uncached(model, dummy_tokens(model, 1)))


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
            most = _longest_text(model, span) - len(TRIAL_PARENTS) - _AFTER
            longest = max(longest, min(span + 1, most))
    return followed, longest


def _longest_text(model: nn.Module, at_least: int) -> int:
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
    return torch.float32 if wide and has_recurrent_states(loaded.config) else dtype


def _score_as_draft(model: nn.Module, text: Sequence[int], nodes: Sequence[int]) -> Tensor:
    """Returns ``[P, V]``: the logits of the compared paths, the root before the nodes of each, and
    of what follows after one was accepted in part.

    Fewer logits are asked for than tokens are fed, as in a round after a rejected draft.
    """
    runner = Runner(model, rows=1, max_length=len(text) + len(nodes) + _AFTER)
    runner.admit(1)
    runner.prefill(0, [text[:-PENDING]])
    tree = Tree.uniform(list(TRIAL_PARENTS), rows=1, device=runner.device)
    tokens = torch.tensor([[*text[-PENDING:], *nodes]], device=runner.device)
    logits = runner.forward(tokens, keep=1 + len(nodes), tree=tree).logits[0]
    read = [logits[[0, *branch]] for branch in TRIAL_PATHS]
    # A part of a path is accepted, and the text goes on otherwise than it was drafted.
    runner.advance_paths(PENDING, [_ACCEPTED])
    runner.drop_checkpoints()
    after = torch.tensor([dummy_tokens(model, _AFTER, first=_OTHER)], device=runner.device)
    read.append(runner.forward(after, keep=_AFTER).logits[0])
    return torch.cat(read).double()


Reader = Callable[[Sequence[int]], Tensor]
"""Returns the logits ``[T, V]`` of a text."""


def _reader(model: nn.Module) -> Reader:
    """Returns what reads texts plainly: transformers' own code, or, where our own code computes a
    model and rounds what it multiplies, one pass over the whole text, which follows nothing that is
    cached: such passes agree to the last bit, and transformers' code adds up in another order."""
    if not quantizes_inputs(model):
        return lambda ids: forward_uncached(model, ids)
    runner = Runner(model, rows=1, max_length=_LONG_WINDOW + PREFIX + len(TRIAL_PARENTS))

    def read(ids: Sequence[int]) -> Tensor:
        runner.retain([])
        runner.admit(1)
        tokens = torch.tensor([list(ids)], device=runner.device)
        # Nothing goes on from within the text, and a state of each of its tokens may be large.
        return runner.forward(tokens, keep=len(ids), num_committed=len(ids) - 1).logits[0]

    return read


def _read_as_text(model: nn.Module, text: Sequence[int], nodes: Sequence[int]) -> Tensor:
    """Returns ``[P, V]``: the same from one plain pass for each path."""
    read, reader = [], _reader(model)
    for branch in TRIAL_PATHS:
        logits = reader([*text, *(nodes[node - 1] for node in branch)])
        read.append(logits[-len(branch) - 1 :])
    after = dummy_tokens(model, _AFTER, first=_OTHER)
    logits = reader([*text, *(nodes[node - 1] for node in _ACCEPTED), *after])
    read.append(logits[-_AFTER:])
    return torch.cat(read).double()
