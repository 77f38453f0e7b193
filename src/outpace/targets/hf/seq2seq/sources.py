"""The sources of an encoder-decoder's rows: each is encoded once, and seen by every pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.request import EncoderInputs
from outpace.errors import ConfigError
from outpace.targets.hf.lock import model_lock
from outpace.targets.hf.runner_hooks import PassInfo, RunnerHooks
from outpace.targets.hf.seq2seq.cross_attention import CrossAttentionCache
from outpace.targets.hf.seq2seq.decoder import DecoderAdapter


class Sources(RunnerHooks):
    """What the rows of one encoder-decoder see besides their own tokens.

    Sources are encoded one by one, without padding, so that a row's numbers are those that it has
    alone; at the latest when a pass covers their row.
    """

    needs_layout = True
    why_not_fixed = "is an encoder-decoder"

    def __init__(self, model: nn.Module, rows: int) -> None:
        """Raises ``UnsupportedModel`` for a decoder that takes no positions."""
        self.decoder: Any = DecoderAdapter(model)
        """Stands for the model in the runner's passes."""
        self.cache = CrossAttentionCache(rows)
        self.min_columns = 2 if self.decoder.drops_short_masks else 1
        self._model, self._given = model, list[EncoderInputs]()  # by row

    # -- rows ----------------------------------------------------------------------------------

    def admit(self, count: int, source: EncoderInputs | None) -> None:
        if source is None:
            raise AssertionError("a row of an encoder-decoder was admitted without a source")
        self.cache.admit(count)
        self._given += [source] * count

    def fork(self, row: int) -> None:
        self.cache.fork(row)
        self._given.append(self._given[row])

    def retain(self, rows: Sequence[int]) -> None:
        self.cache.retain(rows)
        self._given = [self._given[row] for row in rows]

    def reset(self) -> None:
        self.cache.reset()
        self._given = []

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    # -- sources -------------------------------------------------------------------------------

    def encode(self, first: int, token_budget: int) -> int:
        """Encodes the sources of the rows from ``first`` on until the budget is spent; returns how
        many tokens were read, with the last source maybe more than that."""
        spent = 0
        for row in range(first, self.cache.active):
            if spent >= token_budget:
                break
            spent += self._encode(row)
        return spent

    @property
    def encoded(self) -> int:
        """How many rows, from the first on, have their sources encoded."""
        rows = range(self.cache.active)
        return next((row for row in rows if not self.cache.holds(row)), len(rows))

    def _encode(self, row: int) -> int:
        """Sees to it that a row's source is encoded; returns how many tokens were read for it."""
        if self.cache.holds(row):
            return 0
        with model_lock(self._model):  # the decoder's head is hooked for this
            states = encoded(self._model, self._given[row])
            self.cache.put(row, self.decoder.keys_and_values_of(states))
        return int(states.shape[1])

    # -- passes --------------------------------------------------------------------------------

    @contextmanager
    def around(self, given: PassInfo) -> Iterator[None]:
        rows = range(given.first, given.first + len(given.starts))
        for row in rows:
            self._encode(row)
        assert given.layout is not None
        self.decoder.seen = self.cache.seen(given.first, len(rows))
        self.decoder.slot_positions = given.layout.slot_positions
        yield


@torch.inference_mode()
def encoded(model: nn.Module, source: EncoderInputs) -> Tensor:
    """Returns the states ``[1, S, H]`` of a source, read by the model's encoder.

    Those that came with the source are taken as they are, if this model's encoder has made them.
    """
    loaded: Any = model
    if source.states is not None and source.encoder is model:
        return source.states.to(loaded.device)[None]
    arguments = {name: _moved(part, loaded) for name, part in source.features.items()}
    if not arguments and not source.token_ids:
        raise ConfigError(
            f"{type(model).__name__} reads sources with an encoder of its own, and was given only "
            "what another model's encoder made of one: hand over what is encoded, not "
            "encoder_outputs, or draft with a decoder-only model."
        )
    if not arguments:
        ids = torch.tensor([list(source.token_ids)], device=loaded.device)
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    states: Tensor = loaded.get_encoder()(**arguments, return_dict=True).last_hidden_state
    return states


def _moved(part: Tensor, model: Any) -> Tensor:
    """A feature as the encoder takes it, ``[1, ...]``."""
    kind = model.dtype if part.is_floating_point() else part.dtype
    return part.to(device=model.device, dtype=kind)[None]
