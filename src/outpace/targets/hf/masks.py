"""Masks and positions: which slots each column of a pass may attend to, and where it stands.

A pass feeds each row its pending tokens first (committed, but not yet cached; the last one is the
root), then the drafted nodes. Column t of row b is written to slot ``start_b + t``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.trees.tree import Tree
from outpace.targets.hf.attention import BOOLEAN, to_attention_mask
from outpace.targets.hf.plain import dummy_tokens, forward_uncached, is_causal_by_default
from outpace.targets.hf.recurrent.families import NO_KV_LAYER_TYPES, attends


@dataclass(frozen=True, eq=False)
class PassLayout:
    """Positions and visibility of the T columns of a pass over A rows."""

    positions: Tensor  # [A, T]
    seen: Tensor  # [A, T, S] bool
    slot_positions: Tensor  # [A, S]; meaningful only for slots that are seen

    def of_rows(self, count: int) -> PassLayout:
        """Returns the layout of ``count`` rows that are all like the only one of this."""
        parts = (self.positions, self.seen, self.slot_positions)
        return PassLayout(*(part.expand(count, *part.shape[1:]) for part in parts))

    def within(self, window: int) -> Tensor:
        """Returns ``seen`` restricted to a sliding window, measured in positions, not in slots."""
        distance = self.positions[:, :, None] - self.slot_positions[:, None, :]
        return self.seen & (distance < window)

    def within_chunk(self, size: int) -> Tensor:
        """Returns ``seen`` restricted to each column's own chunk of ``size`` positions."""
        chunks, theirs = self.positions // size, self.slot_positions // size
        return self.seen & (chunks[:, :, None] == theirs[:, None, :])


def chain_positions(starts: Tensor, columns: int) -> Tensor:
    """Returns ``[A, T]``: the positions of T columns that follow ``starts`` in order."""
    return starts[:, None] + torch.arange(columns, device=starts.device)


def chain_layout(starts: Tensor, columns: int, slots: int) -> PassLayout:
    """Returns the layout of pending tokens followed by a chain: causal, each row from its start.

    starts: ``[A]``. Padding columns come last, so that nothing real ever sees them.
    """
    slot = torch.arange(slots, device=starts.device)
    positions = chain_positions(starts, columns)
    seen = slot <= positions[..., None]
    return PassLayout(positions, seen, slot.expand(starts.shape[0], -1))


def tree_layout(starts: Tensor, pending: int, tree: Tree, slots: int) -> PassLayout:
    """Returns the layout of ``pending`` tokens, the last of them the root, followed by a tree.

    A node sees what is committed, the pending tokens, its ancestors and itself; its position is the
    one that its token will have if it is accepted, ``start + pending - 1 + depth``.
    """
    device, columns = starts.device, pending + tree.size
    column = torch.arange(columns, device=device)
    node = (column - pending + 1).clamp(min=0)  # [T]; 0 for all pending columns
    related = tree.ancestors[:, node][:, :, node]  # [A, T, T]
    causal = column[:, None] >= column
    allowed = torch.where(column < pending, causal, related)
    depth = torch.where(column < pending, column - (pending - 1), tree.depth[:, node])
    positions = starts[:, None] + pending - 1 + depth

    relative = torch.arange(slots, device=device) - starts[:, None]  # [A, S]
    inside = (relative >= 0) & (relative < columns)
    index = relative.clamp(0, columns - 1)
    here = allowed.gather(2, index[:, None, :].expand(-1, columns, -1))
    seen = (relative < 0)[:, None, :] | (inside[:, None, :] & here)
    committed = torch.arange(slots, device=device).expand_as(relative)
    slot_positions = torch.where(relative < 0, committed, positions.gather(1, index))
    return PassLayout(positions, seen, slot_positions)


_NARROW = ("sliding_attention", "chunked_attention")
"""Types of layers that do not see all that came before."""


class MaskMaker:
    """Puts a layout into the form that one model takes.

    A model with one kind of layer takes one mask. One that lists layers with a sliding window or
    chunks among others in ``layer_types`` takes one mask for each type. One with a window in every
    layer and no such list (Mistral, Phi-3, Mixtral) uses the mask it is given as it is, so the
    window has to be part of that mask.
    """

    def __init__(self, model: nn.Module, max_length: int) -> None:
        """max_length: tokens that a text may have. Asks the model for its window: two passes."""
        loaded: Any = model
        config = loaded.config.get_text_config()
        self.window = window_of(model, max_length)
        self.chunk = chunk_of(model, max_length)
        self._types = frozenset(getattr(config, "layer_types", None) or ())
        self._attends = attends(config)
        self._implementation: str = config._attn_implementation
        self._dtype: torch.dtype = loaded.dtype
        self._reads_forward = is_causal_by_default(model)

    @property
    def has_own(self) -> bool:
        """Whether a causal pass over all slots needs no mask from here: the model then makes its
        own or none at all, and takes a faster kernel."""
        wide = self.window is None and self.chunk is None
        return self._implementation in BOOLEAN and wide and self._reads_forward

    def __call__(self, layout: PassLayout) -> Any:
        """Returns the ``attention_mask`` argument: a tensor ``[A, 1, T, S]`` or a dict of them;
        None for a model in which nothing attends."""
        if not self._attends:
            return None
        narrow = self._narrow(layout)
        if not narrow:
            return self._attended(layout.seen)
        if not self._types.intersection(_NARROW):
            return self._attended(narrow["sliding_attention"])
        wide = self._attended(layout.seen)
        masks: dict[str, Tensor | None] = dict.fromkeys(self._types & NO_KV_LAYER_TYPES)
        masks |= {name: self._attended(seen) for name, seen in narrow.items()}
        # Some models ask for the mask of a type that none of their layers has.
        types = {"full_attention", *masks, *self._types}
        return {name: masks.get(name, wide) for name in types}

    def _narrow(self, layout: PassLayout) -> dict[str, Tensor]:
        """What layers see that do not see all, by their type."""
        narrow = {}
        if self.window is not None:
            narrow["sliding_attention"] = layout.within(self.window)
        if self.chunk is not None:
            narrow["chunked_attention"] = layout.within_chunk(self.chunk)
        return narrow

    def _attended(self, seen: Tensor) -> Tensor:
        return to_attention_mask(seen, self._implementation, self._dtype)


# -- windows and chunks: whether a model has those that its configuration names --------------------


_ANY_LENGTH = 1 << 16
"""Longer than any text that is tried. No more, because some indexers make a place for each token
that they could pick."""
_TOKENS = 3

WINDOW = "sliding_window"
"""Layers see the latest tokens only."""
CHUNK = "attention_chunk_size"
"""Layers see no token of an earlier chunk; chunks begin at fixed positions."""
INDEXED = "index_topk"
"""Layers see this many tokens, which an indexer picks."""
NAMES = (WINDOW, CHUNK)
"""What configurations call the spans of tokens that masks show."""


def window_of(model: nn.Module, longest: int) -> int | None:
    """Returns the sliding window that texts of up to ``longest`` tokens meet, None for no window.

    Configurations carry a ``sliding_window`` whether or not the model's code reads it, so the model
    itself is asked.
    """
    return _met(model, WINDOW, longest)


def chunk_of(model: nn.Module, longest: int) -> int | None:
    """Returns the length of the chunks of attention that texts of up to ``longest`` tokens meet."""
    return _met(model, CHUNK, longest)


def _met(model: nn.Module, name: str, longest: int) -> int | None:
    size = named_span(model, name)
    return None if size is None or size >= longest or not follows(model, name) else size


def named_span(model: nn.Module, name: str) -> int | None:
    """Returns the length of a span in the model's configuration, None where it names none."""
    loaded: Any = model
    size: int | None = getattr(loaded.config.get_text_config(), name, None)
    return size


def follows(model: nn.Module, name: str) -> bool:
    """Returns whether another span of that name gives other scores: two passes over three tokens.

    Bits are compared, not numbers within a tolerance. Where a model computes the same thing twice
    with other bits it is taken to have a window, and the probe at load then refuses it.
    """
    ids = dummy_tokens(model, _TOKENS)
    with with_span(model, name, 1):
        narrow = forward_uncached(model, ids)
    with with_span(model, name, _ANY_LENGTH):
        wide = forward_uncached(model, ids)
    return not torch.equal(narrow, wide)


@contextmanager
def with_span(model: nn.Module, name: str, size: int) -> Iterator[None]:
    """Gives the model another span for a while, wherever its parts look for it."""
    own = named_span(model, name)
    holders = [holder for holder in _parts(model) if _holds(holder, name, own)]
    try:
        for holder in holders:
            setattr(holder, name, size)
        yield
    finally:
        for holder in holders:
            setattr(holder, name, own)


def _parts(model: nn.Module) -> list[Any]:
    """Returns the modules and their configurations, each once: some keep a copy of their own."""
    modules = list(model.modules())
    configs: list[Any] = [getattr(module, "config", None) for module in modules]
    text = [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    return list({id(part): part for part in (*modules, *configs, *text)}.values())


def _holds(part: Any, name: str, size: int | None) -> bool:
    held = getattr(part, name, None)
    return isinstance(held, int) and held == size
