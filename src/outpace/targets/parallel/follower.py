"""Follower processes of tensor parallelism, which repeat the first one's calls on their own parts.

They have no clock, no drafter and no random numbers, and decide nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from outpace.errors import OutpaceError, reason_of
from outpace.targets.base import KVCacheDtype
from outpace.targets.cpu.threads import use_threads
from outpace.targets.hf.loading.reading import hide_progress_bars
from outpace.targets.hf.target import HFTarget
from outpace.targets.parallel.calls import Call, receive
from outpace.targets.parallel.load import ShardSpec, make_shard_target, read_part, shared_modules
from outpace.targets.parallel.processes import (
    DEVICE,
    IDLE,
    join,
    open_store,
    started_with,
    wait_at_barrier,
)


class Follower:
    """Makes the calls of the first process on its own part of the model.

    A call is a method of this class, or one of a target that has a number.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._models: dict[int, nn.Module] = {}
        self._targets: dict[int, HFTarget] = {}

    def make(self, calls: Sequence[Call]) -> None:
        """Makes calls that came together: the last is computed by all processes together, the
        others by each for itself, which the first one has done before."""
        *before, last = calls
        for call in before:
            self._make(call)
        # The first process raises the same, but for a file that this one alone cannot read.
        alike = () if last.name == "load" else (OutpaceError, NotImplementedError)
        with suppress(*alike):
            self._make(last)

    def _make(self, call: Call) -> None:
        if not call.target:
            getattr(self, call.name)(*call.arguments)
            return
        with torch.inference_mode():
            getattr(self._targets[call.target], call.name)(*call.arguments)

    # -- calls of no target ------------------------------------------------------------------------

    def load(self, number: int, part: ShardSpec, threads: int) -> None:
        """Reads this process's part of a model."""
        use_threads(threads)
        self._models[number] = read_part(
            part, lambda: wait_at_barrier(self._store, f"read {number}", self._rank)
        )

    def compute(
        self, number: int, name: str, given: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        """Calls a model, or one of its modules that is called by itself."""
        with torch.inference_mode():
            shared_modules(self._models[number])[name](*given, **named)

    def begin(
        self,
        number: int,
        model: int,
        rows: int,
        max_length: int,
        saved: tuple[int, int | None],
        kv_cache_dtype: KVCacheDtype,
    ) -> None:
        """Makes a target of a model."""
        part = self._models[model]
        self._targets[number] = make_shard_target(part, rows, max_length, saved, kv_cache_dtype)

    def forget(self, number: int) -> None:
        """Lets go of a model or a target."""
        self._models.pop(number, None)
        self._targets.pop(number, None)


def follow() -> None:
    """Makes the calls of the first process until that is gone."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = open_store(rank, count)
    wait_at_barrier(store, "started", rank)
    kind = store.get(DEVICE).decode()
    device = (
        torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    )
    group = join(store, rank, count, device, IDLE)
    _leave_to_the_first(signal.SIGTERM)  # until now the first one may refuse what it was asked for
    follower = Follower(store, rank)
    while True:
        try:
            calls = receive(group, device)
        except RuntimeError:
            return  # the first process is gone, and needs this one no more
        follower.make(calls)


def follow_to_the_end() -> None:
    """Makes the calls of the first process, and ends this one with it."""
    _leave_to_the_first(signal.SIGINT)
    hide_progress_bars(downloads=True)
    code = 0
    try:
        follow()
    except Exception as error:  # whatever stops a pass: the first process notices the end
        code = 1
        rank, count = os.environ["RANK"], os.environ["WORLD_SIZE"]
        why = reason_of(error, named=True)
        said = f"outpace: process {rank} of the {count} that hold the model ends: {why}\n"
        os.write(2, said.encode(errors="replace"))
    os._exit(code)  # others may be gone, for whom torch would wait


def _leave_to_the_first(number: signal.Signals) -> None:
    """Ignores a signal: a terminal sends Ctrl-C to all processes, and a service manager SIGTERM.
    What that means is for the first one to say, which may have texts to finish."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, signal.SIG_IGN)


def follow_unless_first(count: int) -> None:
    """Does not return in a process that torchrun has started to follow the first of ``count``;
    in others it does nothing."""
    if started_with(count):
        follow_to_the_end()


def main() -> None:
    """Runs in a process that the first one has started."""
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    follow_to_the_end()


def _end_with_the_first() -> None:
    """Ends this process when the first one is gone, whatever it computes at that moment."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)
