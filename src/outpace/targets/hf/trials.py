"""Tries models out: whether drafts that are scored through the slot cache get the logits of plain
passes, and why not, in plain words.

Distances are measured in standard deviations of the plain logits, so that they mean the same for
any model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.request import Source
from outpace.core.trees.tree import Tree
from outpace.errors import UnsupportedModel
from outpace.targets.hf.attention import as_attended
from outpace.targets.hf.kinds import GROUPED, is_encoder_decoder, lack_float64
from outpace.targets.hf.masks import INDEXED, NAMES, WITHOUT_MASK, follows, named_span, with_span
from outpace.targets.hf.plain import read_plainly, some_states, some_tokens
from outpace.targets.hf.recurrent.families import STATES, keeps_states
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.setting import autocast_of

PREFIX = 6
"""Tokens before the draft, in the longest text."""
PENDING = 2
"""Those of them that are fed together with the draft; the others are cached before."""
PARENTS = (0, 0, 0, 0, 0, 0, 0, 0, 8, 9)
"""A wide tree: the last of many siblings stands far from where its column would put it."""
BRANCHES = ((1,), (8, 9, 10))
"""The paths whose nodes are compared: the first child, and the longest path."""

COARSE = 0.15
"""How far logits may be off in 16 bits, where a mixture of experts may even send a token to other
experts, and where layers round what they read."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


def tolerance_in(dtype: torch.dtype) -> float:
    """Returns how far logits may be off where the same is computed in another order."""
    return _TOLERANCE.get(dtype, COARSE)


def is_exact(dtype: torch.dtype) -> bool:
    """Returns whether rounding in a dtype is too small to change which tokens are picked."""
    return dtype in _TOLERANCE


def distance(scored: Tensor, expected: Tensor) -> float:
    """Returns how far the logits ``[..., V]`` of some tokens are from the expected ones at most;
    infinitely far where there is a NaN.

    >>> distance(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 3.0]]))
    0.0
    >>> distance(torch.tensor([[1.0, torch.nan]]), torch.tensor([[1.0, 3.0]]))
    inf
    """
    spread = expected.std(-1).clamp(min=1e-12)
    off = (scored - expected).square().mean(-1).sqrt() / spread
    return float(off.nan_to_num(nan=torch.inf).max())


# -- decoders --------------------------------------------------------------------------------------

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
        return _probe_encoder_decoder(model, coarse)
    try:
        most = COARSE if coarse and not _rounds_alike(model) else tolerance(model)
        if _difference(model) <= most and _difference_of_rows(model) <= most:
            return
        reason, cause = _why_other_logits(model), None
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever stops a model in its own forward pass
        reason, cause = _why_it_fails(model, error), error
    raise UnsupportedModel(
        f"{type(model).__name__} cannot be decoded speculatively: {reason}. {_remedy_for(model)}."
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
    reader = _reader(model)
    read = [reader(text)[-PENDING:] for text in texts]
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
            most = _longest_text(model, span) - len(PARENTS) - _AFTER
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


Reader = Callable[[Sequence[int]], Tensor]
"""Returns the logits ``[T, V]`` of a text."""


def _rounds_alike(model: nn.Module) -> bool:
    """Whether our own code computes a model and rounds what it multiplies. Then passes of its own
    agree to the last bit. transformers' code adds up in another order, and may be far off."""
    forward: Any = model.forward
    return bool(getattr(forward, "rounds_inputs", False))


def _reader(model: nn.Module) -> Reader:
    """Returns what reads texts plainly: transformers' own code, or, where a model `_rounds_alike`,
    one pass over the whole text, which follows nothing that is cached."""
    if not _rounds_alike(model):
        return lambda ids: read_plainly(model, ids)
    runner = Runner(model, rows=1, max_length=_LONG_WINDOW + PREFIX + len(PARENTS))

    def read(ids: Sequence[int]) -> Tensor:
        runner.retain([])
        runner.admit(1)
        tokens = torch.tensor([list(ids)], device=runner.device)
        return runner.forward(tokens, keep=len(ids)).logits[0]

    return read


def _read_as_text(model: nn.Module, text: Sequence[int], nodes: Sequence[int]) -> Tensor:
    """Returns ``[P, V]``: the same from one plain pass for each path."""
    read, reader = [], _reader(model)
    for branch in BRANCHES:
        logits = reader([*text, *(nodes[node - 1] for node in branch)])
        read.append(logits[-len(branch) - 1 :])
    after = some_tokens(model, _AFTER, first=_OTHER)
    logits = reader([*text, *(nodes[node - 1] for node in _ACCEPTED), *after])
    read.append(logits[-_AFTER:])
    return torch.cat(read).double()


# -- encoder-decoders ------------------------------------------------------------------------------

_SOURCES = (5, 3)
"""States of the sources of the two rows."""


def _probe_encoder_decoder(model: nn.Module, coarse: bool) -> None:
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
    runner = Runner(model, rows=2, max_length=PREFIX + len(PARENTS))
    lengths = _SOURCES if runner.model.masks_sources else (_SOURCES[0],) * 2
    sources = [_source(model, length, row) for row, length in enumerate(lengths)]
    texts = [_unpadded(model, PREFIX - row, first=3 + row) for row in range(2)]
    nodes = _unpadded(model, len(PARENTS), first=9)
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
    found = [token for token in some_tokens(model, count + 1, first) if token != padding]
    return found[:count]


def _source(model: nn.Module, length: int, seed: int) -> Source:
    """A source that the encoder might have read."""
    return Source(states=some_states(model, length, seed), encoder=model)


def _score_with_sources(
    runner: Runner,
    sources: Sequence[Source],
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
    tree = Tree.uniform(list(PARENTS), rows=len(texts), device=runner.device)
    fed = _columns(runner, [[*text[-PENDING:], *nodes] for text in texts])
    logits = runner.forward(fed, keep=1 + len(nodes), tree=tree).logits
    return [
        torch.cat([one, *(row[[0, *branch]] for branch in BRANCHES)]).double()
        for one, row in zip(alone, logits, strict=True)
    ]


def _columns(runner: Runner, tokens: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([list(row) for row in tokens], device=runner.device)


def _read_with_source(
    runner: Runner, source: Source, text: Sequence[int], nodes: Sequence[int]
) -> Tensor:
    """Returns ``[P, V]``: the same from one plain pass for each path."""
    assert source.states is not None
    read: list[Tensor] = []
    for branch in BRANCHES:
        ids = _columns(runner, [[*text, *(nodes[node - 1] for node in branch)]])
        logits = runner.model.read(source.states[None], ids, use_cache=False).logits[0]
        if not read:
            read.append(logits[len(text) - PENDING, None])
        read.append(logits[-len(branch) - 1 :])
    return torch.cat(read).double()


def _why_decoder_fails(model: nn.Module) -> str:
    """Returns which of the things that a round needs makes the model raise an error."""
    try:
        read_plainly(model, _unpadded(model, PREFIX, first=3))
    except Exception:  # the error that matters is the one that the caller has seen
        return (
            "its decoder cannot write from token ids and the states of its encoder alone (it needs "
            "another input)"
        )
    return "its decoder cannot read several drafted tokens after cached ones"


# -- what is wrong with a model --------------------------------------------------------------------

_SHORT = 6


def _why_it_fails(model: nn.Module, error: Exception) -> str:
    """Returns the first of the things that a round needs at which the model raises an error.

    error: the one that it has raised in a round.
    """
    if "view size is not compatible" in str(error):
        return "it reads the keys of several rows only where they lie one after the other"
    ids, positions, mask = some_tokens(model, _SHORT), _positions(model), _causal(model)
    needed: tuple[tuple[dict[str, Tensor], str], ...] = (
        ({}, _unread_alone(model)),
        ({"position_ids": positions}, "it takes no position_ids, which place drafted tokens"),
        (
            {"position_ids": positions, "attention_mask": mask},
            "it takes no attention mask with a row for each token, which drafted tokens need",
        ),
    )
    for arguments, reason in needed:
        try:
            read_plainly(model, ids, **arguments)
        except Exception:  # the error that matters is the one that the caller has seen
            return reason
    if _attends(model):
        hidden = read_plainly(model, ids, attention_mask=_causal(model, hidden=1))
        if torch.equal(hidden, read_plainly(model, ids)):
            return "it ignores a mask with a row for each token, which drafted tokens need"
    return "it does not work with a cache that is handed to it, but keeps one of another kind"


def _attends(model: nn.Module) -> bool:
    """Whether there are layers that a mask might say something to."""
    loaded: Any = model
    text = loaded.config.get_text_config()
    types = set(getattr(text, "layer_types", None) or ())
    return bool(types - STATES - WITHOUT_MASK) or not (types or keeps_states(text))


def _unread_alone(model: nn.Module) -> str:
    """Returns why a model cannot read a text of token ids."""
    config: Any = model.config
    if lack_float64(model):
        return f"its experts are computed by {GROUPED!r}, which takes no float64"
    codebooks = getattr(config, "num_codebooks", 1)
    if codebooks > 1:
        return f"it reads {codebooks} codes of audio at once, where outpace gives it one token"
    for part, medium in (("vision_config", "an image"), ("audio_config", "audio")):
        if getattr(config, part, None) is not None:
            return (
                f"it reads no text without {medium}, and outpace tries models out with plain texts"
            )
    return "it cannot read a text of token ids alone (it needs another input or a setting)"


def _remedy_for(model: nn.Module) -> str:
    """Returns what to do about a model that cannot be decoded speculatively."""
    if lack_float64(model):
        return "Load it with experts_implementation='eager', or in float32"
    return "Use another model"


def _why_other_logits(model: nn.Module) -> str:
    """Returns which of the things that place drafted tokens the model ignores."""
    ids, positions = some_tokens(model, _SHORT), _positions(model)
    plain = read_plainly(model, ids)
    if torch.equal(read_plainly(model, ids, attention_mask=_causal(model, hidden=1)), plain):
        return "it ignores the attention mask that it is given"
    if not torch.allclose(read_plainly(model, ids, position_ids=positions), plain):
        return "it does not count the positions of a text from 0"
    if torch.equal(read_plainly(model, ids, position_ids=positions * 2), plain):
        return "it ignores the position_ids that it is given"
    return "it reads drafted tokens after cached ones otherwise than the same tokens in a text"


def _positions(model: nn.Module) -> Tensor:
    """Returns ``[1, T]``: the positions of a text."""
    loaded: Any = model
    return torch.arange(_SHORT, device=loaded.device)[None]


def _causal(model: nn.Module, hidden: int = 0) -> Tensor:
    """Returns the mask ``[1, 1, T, T]`` of a text; its last token does not see the first
    ``hidden`` ones."""
    loaded: Any = model
    seen = torch.ones(1, _SHORT, _SHORT, dtype=torch.bool, device=loaded.device).tril()
    seen[:, -1, :hidden] = False
    return as_attended(seen, loaded.config.get_text_config()._attn_implementation, loaded.dtype)
