"""The decoder of an encoder-decoder, which a runner calls as if it were a causal language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from outpace.errors import UnsupportedModel
from outpace.targets.hf.attention import to_attention_mask
from outpace.targets.hf.cache import cache_name
from outpace.targets.hf.lock import model_lock
from outpace.targets.hf.logits import PassOutput
from outpace.targets.hf.patching import patch_attribute
from outpace.targets.hf.position_patches import looked_up
from outpace.targets.hf.seq2seq.cross_attention import CrossAttentionLayer, VisibleSources
from outpace.targets.hf.weights import pass_bytes


class DecoderAdapter:
    """Takes what a causal language model takes, and returns logits and hidden states.

    What its rows see of their sources is set before each pass, as ``seen``, and as
    ``slot_positions`` where the slots of its own cache stand.
    """

    def __init__(self, model: Any) -> None:
        """Raises ``UnsupportedModel`` for a decoder that takes no positions."""
        self.model: Any = model
        self.config: Any = self.model.config
        self.seen: VisibleSources
        self.slot_positions: Tensor  # [A, S]; meaningful only for slots that are seen
        self.drops_short_masks = self.config.model_type == "led"
        """Whether the model ignores the mask of a pass over one column."""
        self._positions = DecoderPositions(model)
        decoder: Any = self.model.get_decoder()
        self.masks_sources = (
            "encoder_attention_mask" in inspect.signature(decoder.forward).parameters
        )
        """Whether sources of different lengths can be seen in one pass."""
        self._cache_name = cache_name(model.forward)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def training(self) -> bool:
        """Whether the model drops some of what it computes at random."""
        training: bool = self.model.training
        return training

    @property
    def pass_bytes(self) -> int:
        """Bytes of the decoder's weights that one pass reads. Those that made the keys and values
        of sources are not parted from the others."""
        return pass_bytes(self.model.get_decoder()) + pass_bytes(self.get_output_embeddings())

    def get_input_embeddings(self) -> nn.Module:
        """The decoder's."""
        found: nn.Module = self.model.get_decoder().get_input_embeddings()
        return found

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        found: nn.Module = self.model.get_output_embeddings()
        return found

    def compute_logits(self, states: Tensor) -> Tensor:
        """Returns the logits ``[..., V]`` of states ``[..., H]`` as the last layer leaves them."""
        scale = getattr(self.config, "scale_decoder_outputs", False)
        scaled = states * self.model.model_dim**-0.5 if scale else states
        # A pass may have hooked the head, to let it see the last columns only.
        with model_lock(self.model):
            logits: Tensor = self.get_output_embeddings()(scaled)
        bias = getattr(self.model, "final_logits_bias", None)
        return logits if bias is None else logits + bias

    def modules(self) -> Iterator[nn.Module]:
        """Yields the decoder's modules, which may have to be patched for more than their places."""
        return iter(self.model.get_decoder().modules())

    def __call__(self, **given: Any) -> PassOutput:
        """Returns what `forward` does."""
        return self.forward(**given)

    def forward(
        self,
        *,
        position_ids: Tensor,
        attention_mask: Tensor,
        past_key_values: Cache,
        logits_to_keep: int,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool = True,
        **options: Any,
    ) -> PassOutput:
        """Returns logits ``[A, keep, V]`` of the last columns, and hidden states if they are asked
        for. attention_mask: ``[A, 1, T, S]``, over the slots of its own cache; always given, since
        a decoder would count its own columns from the longest row."""
        rows = position_ids.shape[0]
        columns = ColumnPositions(position_ids, self.slot_positions, input_ids)
        with self._positions.applied(columns) as placed, _keeping(self.model, logits_to_keep):
            output = self.model(
                decoder_input_ids=input_ids,
                decoder_inputs_embeds=inputs_embeds,
                decoder_attention_mask=attention_mask,
                attention_mask=self._source_mask(position_ids.shape[1]),
                encoder_outputs=self._stand_in(rows),
                use_cache=use_cache,
                **{self._cache_name: _BothCaches(past_key_values, self.seen.layers)},
                **placed,
                **options,
            )
        states = getattr(output, "decoder_hidden_states", None)
        return PassOutput(logits=output.logits, hidden_states=states)

    def read(self, states: Tensor, tokens: Tensor, **options: Any) -> Any:
        """Returns the model's output for one text in one pass, without the cache of a runner.

        states: ``[1, S, H]``, the encoder's. tokens: ``[1, T]``.
        """
        encoded = BaseModelOutput(last_hidden_state=states)
        with model_lock(self.model):
            return self.model(decoder_input_ids=tokens, encoder_outputs=encoded, **options)

    @torch.inference_mode()
    def keys_and_values_of(self, states: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns each layer's keys and values ``[H, S, D]`` of one source, ``[1, S, H]``, as the
        decoder itself makes them when it begins a text."""
        both = EncoderDecoderCache(DynamicCache(), DynamicCache())
        start = torch.zeros(1, 1, dtype=torch.long, device=states.device)
        with _keeping(self.model, 1):
            self.read(states, start, use_cache=True, **{self._cache_name: both})
        layers: Sequence[Any] = both.cross_attention_cache.layers
        return [(layer.keys[0], layer.values[0]) for layer in layers]

    def _stand_in(self, rows: int) -> BaseModelOutput:
        """The encoder's states, whose numbers nobody reads again: only their shape is looked at."""
        blank = torch.empty(1, 1, 1, dtype=self.dtype, device=self.device)
        return BaseModelOutput(last_hidden_state=blank.expand(rows, self.seen.slots, 1))

    def _source_mask(self, columns: int) -> Tensor | None:
        visible = self.seen.visible
        if visible is None:
            return None
        if not self.masks_sources:
            raise AssertionError(f"{type(self.model).__name__} sees sources of one length only")
        wide = visible[:, None, :].expand(-1, columns, -1)
        kind = self.config.get_text_config()._attn_implementation
        return to_attention_mask(wide, kind, self.dtype)


class _BothCaches(EncoderDecoderCache):
    """A slot cache for what the decoder writes, and what it sees of the sources."""

    def __init__(self, own: Cache, layers: Sequence[CrossAttentionLayer]) -> None:
        # Not the base class's own, which wants a cache of transformers for the sources too.
        self.self_attention_cache: Any = own
        self.cross_attention_cache: Any = SimpleNamespace(layers=layers)
        self.is_updated = dict.fromkeys(range(len(layers)), True)

    def __len__(self) -> int:
        return len(self.self_attention_cache)


@contextmanager
def _keeping(model: nn.Module, keep: int) -> Iterator[None]:
    """Lets the head see only the last columns while the block runs; all of them for 0."""
    loaded: Any = model

    def cut(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0][:, -keep:], *args[1:])

    with loaded.get_output_embeddings().register_forward_pre_hook(cut):
        yield


# -- positions -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ColumnPositions:
    """Where the columns and the slots of a pass stand in their texts."""

    positions: Tensor  # [A, T]
    slot_positions: Tensor  # [A, S]; meaningful only for slots that are seen
    tokens: Tensor | None  # [A, T]; None where embeddings stand for them

    @cached_property
    def distances(self) -> Tensor:
        """``[A, T, S]``: how far after each column each slot stands, before it if negative."""
        return self.slot_positions[:, None, :] - self.positions[:, :, None]


Placed = Callable[[ColumnPositions], Any]
"""Makes a function that stands for a module's own while the columns stand in these places."""


class DecoderPositions:
    """How one model learns the places of its decoder's columns.

    Raises ``UnsupportedModel`` for a decoder that takes none.
    """

    def __init__(self, model: nn.Module) -> None:
        loaded: Any = model
        self._takes_positions = (
            "decoder_position_ids" in inspect.signature(loaded.forward).parameters
        )
        self._patched = list(_patched(loaded.get_decoder()))
        if not (self._takes_positions or self._patched):
            raise UnsupportedModel(
                f"{type(model).__name__} places its decoder's tokens in a way that outpace does "
                "not know: use another encoder-decoder."
            )

    @property
    def counts_padding(self) -> bool:
        """Whether the model's own ``generate`` counts padding before a text as tokens of it."""
        looked_up = any(name == "forward" for _, name, _ in self._patched)
        return looked_up and not self._takes_positions

    @contextmanager
    def applied(self, columns: ColumnPositions) -> Iterator[dict[str, Tensor]]:
        """Patches the decoder while the block runs; yields further arguments of the model."""
        with ExitStack() as stack:
            for module, name, placed in self._patched:
                stack.enter_context(patch_attribute(module, name, placed(columns)))
            yield {"decoder_position_ids": columns.positions} if self._takes_positions else {}


def _patched(decoder: nn.Module) -> Iterator[tuple[nn.Module, str, Placed]]:
    """Yields the modules that count positions themselves, with the methods that do."""
    table: Any = getattr(decoder, "embed_positions", None)
    if isinstance(table, nn.Embedding):
        yield table, "forward", lambda columns: looked_up(table, columns.positions)
    elif hasattr(table, "create_position_ids_from_input_ids"):
        yield table, "forward", lambda columns: _after_padding(table, columns)
    for module in decoder.modules():
        if getattr(module, "has_relative_attention_bias", False):
            yield module, "compute_bias", _of_module(module)


def _of_module(module: nn.Module) -> Placed:
    return lambda columns: _by_distance(module, columns)


def _after_padding(table: Any, columns: ColumnPositions) -> Callable[..., Tensor]:
    """M2M100's table: position 0 is the one after the number of the padding token, and padding
    has no position."""
    rows = columns.positions + table.padding_idx + 1
    if columns.tokens is not None:
        rows = torch.where(columns.tokens == table.padding_idx, table.padding_idx, rows)
    return lambda *_, **__: table.weights[rows]


def _by_distance(module: Any, columns: ColumnPositions) -> Callable[..., Tensor]:
    """T5's bias, a number for each bucket of distances and each head: ``[A, H, T, S]``."""

    def compute_bias(*_: Any, **__: Any) -> Tensor:
        found: Tensor = module.relative_attention_bias(_buckets(module, columns.distances))
        return found.permute(0, 3, 1, 2)

    return compute_bias


def _buckets(module: Any, distance: Tensor) -> Tensor:
    bucket = module._relative_position_bucket
    named = {
        "bidirectional": False,
        "num_buckets": module.relative_attention_num_buckets,
        "max_distance": module.relative_attention_max_distance,
    }
    known: Sequence[str] = list(inspect.signature(bucket).parameters)
    found: Tensor = bucket(distance, **{name: named[name] for name in named if name in known})
    return found
