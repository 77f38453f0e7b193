"""The layers of a multi-token-prediction module, as a small text model of its target's family.

A module reads a joined embedding and state in the place of an embedding, and its last norm comes
before the target's output matrix. So transformers' class of the family holds it, with the family's
attention, experts, norms, rotary angles and masks; here it gets the keys and values of a draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outpace.errors import UnsupportedModel
from outpace.targets.hf.attention import apply_window, to_attention_mask, use_grouped
from outpace.targets.hf.cache import cache_name
from outpace.targets.hf.kinds import compute_in_float64

NORMS = ("norm", "norm_f", "final_layernorm")
"""What transformers calls the last norm of a text model."""
OTHER_NORMS = ("ln_f", "final_layer_norm", "final_norm", "embedding_norm")
"""The same, of families without such modules."""


@dataclass(frozen=True, eq=False)
class NextN:
    """A module, which foresees the token after the next one."""

    enorm: nn.Module
    hnorm: nn.Module
    eh_proj: nn.Module
    layers: NextNLayers
    """With the norm that comes before the target's output matrix."""
    states_first: bool = False
    """Whether ``eh_proj`` reads the state before the embedding."""
    embed: nn.Module | None = None
    """The embeddings that it reads; None: the target's."""
    head: Any = None
    """The linear layer that makes its logits; None: the target's output matrix."""


class NextNLayers(nn.Module):
    """The layers of one module with the norm after them. It keeps no state."""

    def __init__(self, decoder: nn.Module) -> None:
        """decoder: the text model without its head. Its embeddings are taken out."""
        super().__init__()
        model: Any = decoder
        use_grouped(model)
        compute_in_float64(model)
        model.set_input_embeddings(nn.Identity())
        self.decoder = decoder.eval()
        self._cache_name = cache_name(model.forward)
        config = model.config
        self._types = frozenset(getattr(config, "layer_types", None) or ())
        self._window: int | None = getattr(config, "sliding_window", None)
        self._keys: list[_Piece] = []
        self._values: list[_Piece] = []
        self._find_sizes(int(config.hidden_size))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        found = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        compute_in_float64(self.decoder)  # which its weights may have become now
        return found

    @property
    def norm(self) -> nn.Module:
        """The norm after the last layer."""
        return last_norm(self.decoder)

    def begin(self, rows: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values ``[B, G, 0, D]`` of no entries."""
        weight = next(self.decoder.parameters())
        sizes = (
            (sum(each.groups for each in of), max(each.width for each in of))
            for of in (self._keys, self._values)
        )
        keys, values = (weight.new_empty(rows, groups, 0, width) for groups, width in sizes)
        return keys, values

    def forward(
        self, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor, visible: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the outputs ``[B, W, H]``, and the new keys and values ``[B, G, W, D]``.

        x: ``[B, W, H]``; positions: ``[B, W]``; keys, values: ``[B, G, L, D]`` of what comes
        before; visible: ``[B, W, L + W]`` bool, what each column attends to.
        """
        parts = {(each.layer, each.what): part for each, part in _apart(keys, self._keys)}
        parts |= {(each.layer, each.what): part for each, part in _apart(values, self._values)}
        cache = EntryCache(parts)
        found = self._run(x, positions, cache, visible)
        return found, _together(cache.new, self._keys), _together(cache.new, self._values)

    def _run(self, x: Tensor, positions: Tensor, cache: EntryCache, visible: Tensor) -> Tensor:
        model: Any = self.decoder
        found: Tensor = model(
            inputs_embeds=x,
            attention_mask=self._masks(visible, x.dtype),
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: cache},
        ).last_hidden_state
        return found

    def _masks(self, visible: Tensor, dtype: torch.dtype) -> Any:
        """The ``attention_mask`` argument: one mask, or one for each type of layer."""
        implementation: str = self.decoder.config._attn_implementation  # type: ignore[union-attr,assignment]
        wide = to_attention_mask(visible, implementation, dtype)
        if "sliding_attention" not in self._types or self._window is None:
            return wide
        slid = to_attention_mask(apply_window(visible, self._window), implementation, dtype)
        types = {"full_attention", *self._types}
        return {name: slid if name == "sliding_attention" else wide for name in types}

    @torch.no_grad()
    def _find_sizes(self, size: int) -> None:
        """Looks at what one entry leaves in the cache: families differ in their keys."""
        weight = next(self.decoder.parameters())
        cache = EntryCache({})
        one = torch.ones(1, 1, 1, dtype=torch.bool, device=weight.device)
        at = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
        self._run(weight.new_zeros(1, 1, size), at, cache, one)
        for (layer, what), new in cache.new.items():
            piece = _Piece(layer, what, new.shape[1], new.shape[3])
            (self._values if what == "values" else self._keys).append(piece)


def last_norm(decoder: nn.Module) -> nn.Module:
    """Returns the norm after the last layer of a text model; ``UnsupportedModel`` where it has none
    by a name that is known."""
    found = (getattr(decoder, name, None) for name in (*NORMS, *OTHER_NORMS))
    norm = next((norm for norm in found if isinstance(norm, nn.Module)), None)
    if norm is None:
        raise UnsupportedModel(
            f"the norm after the last layer of {type(decoder).__name__} is not known: use a head "
            "that does not need it."
        )
    return norm


@contextmanager
def last_layer_output(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yields a list that takes what the last layer puts out in the model's next pass, ``[A, T,
    H]``, before the norm after it. transformers shows it through that norm only."""
    whole: Any = model
    found: list[Tensor] = []

    def take(module: nn.Module, given: tuple[Any, ...]) -> None:
        found.append(given[0])

    handle = last_norm(whole.get_decoder()).register_forward_pre_hook(take)
    try:
        yield found
    finally:
        handle.remove()


class _Piece(NamedTuple):
    """Some of the groups of packed keys or values."""

    layer: int
    what: str
    groups: int
    width: int


def _apart(packed: Tensor, pieces: Sequence[_Piece]) -> list[tuple[_Piece, Tensor]]:
    """Returns what each piece is of the packed groups ``[B, G, L, D]``."""
    parts = torch.split(packed, [each.groups for each in pieces], 1)
    return [(each, part[..., : each.width]) for each, part in zip(pieces, parts, strict=True)]


def _together(new: dict[tuple[int, str], Tensor], pieces: Sequence[_Piece]) -> Tensor:
    """Returns the pieces as groups of one width, ``[B, G, W, D]``: a layer may have other keys than
    the next one, and those of an indexer besides."""
    width = max(each.width for each in pieces)
    return torch.cat(
        [nn.functional.pad(new[e.layer, e.what], (0, width - e.width)) for e in pieces], 1
    )


class EntryCache:
    """What a text model takes for its cache."""

    is_compileable = False

    def __init__(self, before: dict[tuple[int, str], Tensor]) -> None:
        self._before = before
        self.new: dict[tuple[int, str], Tensor] = {}

    def _after(self, layer: int, what: str, new: Tensor) -> Tensor:
        self.new[layer, what] = new
        before = self._before.get((layer, what))
        return new if before is None else torch.cat([before, new], 2)

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns all keys and values, those of the new columns after the others."""
        return self._after(layer_idx, "keys", keys), self._after(layer_idx, "values", values)

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """The same for keys ``[B, W, D]`` by which an indexer picks what attention sees."""
        return self._after(layer_idx, "index", keys[:, None])[:, 0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many entries come before."""
        return next((part.shape[2] for part in self._before.values()), 0)
