"""Tries encoder-decoders out: whether drafts get the logits of plain passes over a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.request import EncoderInputs
from outpace.core.trees.tree import Tree
from outpace.errors import UnsupportedModel
from outpace.targets.hf.distance import (
    COARSE,
    PENDING,
    PREFIX,
    TRIAL_PARENTS,
    TRIAL_PATHS,
    distance,
    tolerance_in,
)
from outpace.targets.hf.plain import dummy_states, dummy_tokens, forward_uncached
from outpace.targets.hf.runner import Runner

_SOURCES = (5, 3)
"""States of the sources of the two rows."""


def probe_encoder_decoder(model: nn.Module, coarse: bool) -> None:
    """Raises ``UnsupportedModel``, with the reason, unless drafts that are scored through the slot
    cache get the logits of plain passes over the same sources.

    coarse: the layers round, so that the last bit of an input may be seen in the output.
    """
    loaded: Any = model
    tolerance = COARSE if coarse else tolerance_in(loaded.dtype)
    cause: Exception | None = None
    try:
        reason = _fault(model, tolerance)
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever stops a model in its own forward pass
        reason, cause = _why_decoder_fails(model), error
    if reason is not None:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be decoded speculatively: {reason}. Use another model."
        ) from cause


@torch.inference_mode()
def _fault(model: nn.Module, tolerance: float) -> str | None:
    """Returns what is wrong with the logits that the model gives drafts, None if nothing is."""
    runner = Runner(model, rows=2, max_length=PREFIX + len(TRIAL_PARENTS))
    lengths = _SOURCES if runner.model.masks_sources else (_SOURCES[0],) * 2
    sources = [_source(model, length, row) for row, length in enumerate(lengths)]
    texts = [_unpadded(model, PREFIX - row, first=3 + row) for row in range(2)]
    nodes = _unpadded(model, len(TRIAL_PARENTS), first=9)
    pairs = zip(sources, texts, strict=True)
    expected = [_read_with_source(runner, *pair, nodes) for pair in pairs]
    if not all(bool(logits.isfinite().all()) for logits in expected):
        return "its logits are NaN or infinite: its weights are damaged, or numbers overflow"
    scored = _score_with_sources(runner, sources, texts, nodes)
    off = max(distance(*pair) for pair in zip(scored, expected, strict=True))
    if off <= tolerance:
        return None
    return (
        "drafted tokens after cached ones get other logits than the same tokens in a text: it "
        "ignores the mask or the positions that it is given"
    )


def _unpadded(model: Any, count: int, first: int) -> list[int]:
    """A text without padding: M2M100 gives padding no position of its own, and then counts the
    tokens after it otherwise with a cache than without."""
    padding = model.config.pad_token_id
    found = [token for token in dummy_tokens(model, count + 1, first) if token != padding]
    return found[:count]


def _source(model: nn.Module, length: int, seed: int) -> EncoderInputs:
    """A source that the encoder might have read."""
    return EncoderInputs(states=dummy_states(model, length, seed), encoder=model)


def _score_with_sources(
    runner: Runner,
    sources: Sequence[EncoderInputs],
    texts: Sequence[Sequence[int]],
    nodes: Sequence[int],
) -> list[Tensor]:
    """Returns ``[P, V]`` for each row: the logits of the token before the root from a pass of its
    own, and those of the compared paths, the root before each.

    The rows have cached texts of different lengths.
    """
    for source in sources:
        runner.admit(1, source)
    runner.prefill(0, [text[:-PENDING] for text in texts])
    alone = runner.forward(_columns(runner, [[text[-PENDING]] for text in texts]), keep=1).logits
    tree = Tree.uniform(list(TRIAL_PARENTS), rows=len(texts), device=runner.device)
    fed = _columns(runner, [[*text[-PENDING:], *nodes] for text in texts])
    logits = runner.forward(fed, keep=1 + len(nodes), tree=tree).logits
    return [
        torch.cat([one, *(row[[0, *branch]] for branch in TRIAL_PATHS)]).double()
        for one, row in zip(alone, logits, strict=True)
    ]


def _columns(runner: Runner, tokens: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([list(row) for row in tokens], device=runner.device)


def _read_with_source(
    runner: Runner, source: EncoderInputs, text: Sequence[int], nodes: Sequence[int]
) -> Tensor:
    """Returns ``[P, V]``: the same from one plain pass for each path."""
    assert source.states is not None
    read: list[Tensor] = []
    for branch in TRIAL_PATHS:
        ids = _columns(runner, [[*text, *(nodes[node - 1] for node in branch)]])
        logits = runner.model.read(source.states[None], ids, use_cache=False).logits[0]
        if not read:
            read.append(logits[len(text) - PENDING, None])
        read.append(logits[-len(branch) - 1 :])
    return torch.cat(read).double()


def _why_decoder_fails(model: nn.Module) -> str:
    """Returns which of the things that a round needs makes the model raise an error."""
    try:
        forward_uncached(model, _unpadded(model, PREFIX, first=3))
    except Exception:  # the error that matters is the one that the caller has seen
        return (
            "its decoder cannot write from token ids and the states of its encoder alone (it needs "
            "another input)"
        )
    return "its decoder cannot read several drafted tokens after cached ones"
