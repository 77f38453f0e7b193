"""A target that is split over several processes, as the first of them sees it: it makes each call
on its own part, and has the others make it on theirs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from outpace.core.proposal import AuxTokens
from outpace.errors import ConfigError
from outpace.targets.base import (
    EarlyExitView,
    KVCacheDtype,
    PartialView,
    PrefillChunk,
    PromptInputs,
    ScoreInputs,
    Scores,
    SubLayers,
    Target,
)
from outpace.targets.hf.lock import model_lock
from outpace.targets.parallel.calls import Call
from outpace.targets.parallel.load import OUT, SplitModel, make_shard_target


class Leader(Target):
    """Rows of a model of which this process holds a part.

    Logits and hidden states are whole in every process; keys and values of a head lie where the
    head is. What a call computes is computed by all processes together (`Processes.call`). What
    each does by itself, such as committing a path, the others do before the next such call
    (`Processes.note`).
    """

    def __init__(
        self,
        loaded: SplitModel,
        rows: int,
        max_length: int,
        saved: tuple[int, int | None] = (0, None),
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        """saved: how many ended texts stay cached, and how many tokens of them, as `PrefixStore`
        takes them."""
        self._loaded = loaded
        self._processes = loaded.processes
        self._number = self._processes.next_number()
        given = (rows, max_length, saved, kv_cache_dtype)
        begin = Call("begin", (self._number, loaded.number, *given))
        with model_lock(loaded.model):  # some models are tried out when a target is made
            self._own = self._processes.call(begin, lambda: make_shard_target(loaded.model, *given))
        self.device, self.dtype = self._own.device, self._own.dtype
        self.has_prefix_cache = self._own.has_prefix_cache
        self.kv_cache_dtype = kv_cache_dtype
        self.max_rows, self.max_length = rows, max_length
        weakref.finalize(self, self._processes.forget, self._number).atexit = False

    def _call(self, name: str, *arguments: Any) -> Any:
        work = partial(getattr(self._own, name), *arguments)
        with model_lock(self._loaded.model):
            return self._processes.call(Call(name, arguments, self._number), work)

    def _note(self, name: str, *arguments: Any) -> Any:
        work = partial(getattr(self._own, name), *arguments)
        with model_lock(self._loaded.model):
            return self._processes.note(Call(name, arguments, self._number), work)

    @property
    def failure_reason(self) -> str | None:
        return self._processes.failure_reason

    # -- rows ------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        return self._own.num_rows

    @property
    def num_ready_rows(self) -> int:
        return self._own.num_ready_rows

    @property
    def lengths(self) -> Sequence[int]:
        return self._own.lengths

    def admit(self, inputs: PromptInputs) -> int:
        row: int = self._note("admit", inputs)
        return row

    def fork(self, row: int, with_output: bool = False) -> int:
        number: int = self._note("fork", row, with_output)
        return number

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self._note("commit", paths)

    def retain(self, rows: Sequence[int], texts: Mapping[int, Sequence[int]] | None = None) -> None:
        self._note("retain", rows, texts)

    def forget_texts(self) -> None:
        self._note("forget_texts")

    def reset(self) -> None:
        """As `Target.reset`, also where a process is lost: requests end one after the other then,
        with an error that says so."""
        if self.failure_reason is None:
            self._note("reset")
        else:
            self._own.reset()

    # -- passes ----------------------------------------------------------------------------------

    def prefill(
        self, token_budget: int, layers: frozenset[int] = frozenset(), full: bool = False
    ) -> list[PrefillChunk]:
        found: list[PrefillChunk] = self._call("prefill", token_budget, layers, full)
        return found

    def score(self, inputs: ScoreInputs) -> Scores:
        if inputs.aux_tokens is not None and inputs.aux_tokens.entry_layer:
            self._refuse("have drafts join its passes after some of its layers")
        found: Scores = self._call("score", inputs)
        return found

    def step_context(self) -> AbstractContextManager[None]:
        return self._own.step_context()

    # -- what it costs: all processes together -----------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        return self._own.weight_bytes

    @property
    def pass_bytes(self) -> int:
        return self._own.pass_bytes

    @property
    def expert_bytes(self) -> tuple[float, float]:
        return self._own.expert_bytes

    @property
    def lm_head_bytes(self) -> int:
        return self._own.lm_head_bytes

    @property
    def cache_bytes(self) -> int:
        return self._own.cache_bytes * self._processes.count

    # -- capabilities ----------------------------------------------------------------------------

    # The model and its modules are shared by themselves where they are called (`load`).

    def embed(self, tokens: Tensor) -> Tensor:
        return self._own.embed(tokens)

    @property
    def embedding_scale(self) -> float:
        return self._own.embedding_scale

    def compute_logits(self, states: Tensor) -> Tensor:
        return self._own.compute_logits(states)

    def apply_soft_cap(self, logits: Tensor) -> Tensor:
        return self._own.apply_soft_cap(logits)

    def forward_uncached(self, token_ids: Sequence[int], last: int | None = None) -> Tensor:
        if self.kv_cache_dtype == "auto":
            return self._own.forward_uncached(token_ids, last)
        found: Tensor = self._call("forward_uncached", token_ids, last)  # through slots
        return found

    def forward_aux(self, token_ids: Sequence[int], aux_tokens: AuxTokens) -> Tensor:
        if aux_tokens.entry_layer:
            self._refuse("have drafts join its passes after some of its layers")
        found: Tensor = self._call("forward_aux", token_ids, aux_tokens)
        return found

    def new_target(self, rows: int) -> Leader:
        kind = self.kv_cache_dtype
        return Leader(self._loaded, rows, self.max_length, kv_cache_dtype=kind)

    def view(self, skipped: SubLayers) -> PartialView:
        self._refuse("leave out some of its layers")

    def early_exit(self, layers: int) -> EarlyExitView:
        self._refuse("stop after some of its layers")

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(
            f"{self._loaded.name} is split over {self._processes.count} processes, and cannot "
            f"{what}: draft with a look-up, another model or a head on its last states, or {OUT}."
        )
