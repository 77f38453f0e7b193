"""The processes that hold a model together: how the first one starts or finds the others, gives
them its calls, and notices that one is lost.

Each process, a rank, holds a part of every layer. The first one (rank 0) decides everything, and
the others make the calls that it makes (`follower`): one decider cannot disagree with itself, as
ranks do that measure times each for itself. What they add up in a pass goes through NCCL on GPUs
and through gloo on a CPU; calls always go through gloo, where waiting keeps no GPU busy.

torchrun may have started all of them. Otherwise the first one starts the others, which end when it
does, however it does: they hold the reading end of a pipe of which it alone has the other one. What
concerns GPUs has not been run yet.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from outpace.errors import ConfigError, OutpaceError, ProcessLost, reason_of
from outpace.targets.parallel.calls import Call, packed, send

WAIT = timedelta(seconds=60)
"""How long a process waits for another one within a pass. They compute the same number of products
between two sums, so that one that is this late hangs."""
START_TIMEOUT = timedelta(minutes=10)
"""How long all of them may take to start, and to read their weights."""
IDLE = timedelta(days=3650)
"""How long the others wait for the next call: a server may have nothing to do."""
ENDING = 5.0
"""Seconds in which a process that was started here ends by itself, before it is killed."""
NOTICING = 1.0
"""Seconds within which the end of a process that was started here becomes known."""
HOST = "127.0.0.1"
DEVICE = "outpace/device"
"""Where the first process says in the store what all of them compute on."""

_FOLLOW = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.path[:] = json.loads(sys.argv[1]); "
    "from outpace.targets.parallel.follower import main; main()"
)

Done = TypeVar("Done")


def started_with(count: int) -> int | None:
    """Returns the rank of this process among those that torchrun has started, None where it has
    started none. Raises ``ConfigError`` where they are not as many as the model shall have."""
    rank, world = os.environ.get("RANK"), int(os.environ.get("WORLD_SIZE") or 1)
    if rank is None or world == 1:
        return None
    if world != count:
        raise ConfigError(
            f"torchrun has started {world} processes (WORLD_SIZE), and tensor_parallel_size is "
            f"{count}: give the same number to both, or unset WORLD_SIZE."
        )
    return int(rank)


def open_store(rank: int, count: int) -> Any:
    """Returns the store at which the processes that torchrun has started leave messages, once this
    one has come there."""
    from torch.distributed.rendezvous import rendezvous  # there are builds of torch without it

    try:
        store, _, _ = next(rendezvous("env://", rank, count, timeout=START_TIMEOUT))
    except RuntimeError as error:
        raise OutpaceError(
            f"of the {count} processes that are to hold the model not all have come "
            f"({reason_of(error)}): start all of them with torchrun --nproc-per-node={count}."
        ) from error
    return store


def join(store: Any, rank: int, count: int, device: torch.device, idle: timedelta) -> Any:
    """Waits for all processes, and returns the group that calls go through.

    idle: how long this process waits for a call, or for its being taken.
    """
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if gpu else "gloo",
        store=store,
        rank=rank,
        world_size=count,
        timeout=WAIT,
        device_id=device if gpu else None,
    )
    return distributed.new_group(backend="gloo", timeout=idle)


def is_about_others(error: BaseException) -> bool:
    """Returns whether an error says that another process is gone or late."""
    words = str(error).lower()
    return isinstance(error, distributed.DistError) or "gloo" in words or "nccl" in words


@dataclass
class _Fate:
    """What has become of the processes, as every thread of the first one sees it."""

    closing: bool = False
    failure_reason: str | None = None


class Processes:
    """The processes that hold a model together, as the first of them sees them.

    They are there until `close`, or until nobody knows of this object any more.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        """device: what this process computes on."""
        if distributed.is_initialized():
            gc.collect()  # a model that was let go of refers to itself
        if distributed.is_initialized():
            raise ConfigError(
                "torch.distributed is in use in this process already, by another model with "
                "tensor_parallel_size maybe, and there can be one of these at a time: let go of "
                "that one before."
            )
        self.count, self.device = count, device
        self.turn = threading.RLock()
        """Is held by who makes a call. A model's own lock is taken before it, where both are."""
        self.inside = False
        """Whether a call is being made."""
        self._waiting: list[Call] = []
        self._numbers = itertools.count(1)
        self._fate = _Fate()
        self._children: list[subprocess.Popen[bytes]] = []
        self._close = weakref.finalize(self, _end, self._fate, self._children, os.getpid())
        try:
            self._store = self._start()
            self._store.set(DEVICE, device.type)
            self.meet("started")
            self._group = join(self._store, 0, count, device, WAIT)
        except BaseException:
            self.close()
            raise

    def _start(self) -> Any:
        """Starts the other processes, unless torchrun has; returns the store."""
        if started_with(self.count) is not None:
            known = open_store(0, self.count)
            if known.check([DEVICE]):  # which the first model has set
                raise ConfigError(
                    "the processes that torchrun has started held a model, and ended with it: "
                    "load one model for each start of torchrun, or leave torchrun out, and the "
                    "processes are started here for each."
                )
            return known
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        world = self.count
        # Bound to this machine alone: whoever joins may send calls, which are pickles.
        listening = socket.create_server((HOST, 0))
        store: Any = TCPStore(
            HOST,
            listening.getsockname()[1],
            world,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            use_libuv=False,
        )
        for rank in range(1, world):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": HOST,
                "MASTER_PORT": str(store.port),
            }
            child = _spawn(environment)
            self._children.append(child)
            threading.Thread(
                target=_watch, args=(child, rank, world, self._fate), daemon=True
            ).start()
        return store

    @property
    def failure_reason(self) -> str | None:
        """Why no call can be made any more, as a sentence; None as long as one can."""
        return self._fate.failure_reason

    def next_number(self) -> int:
        """Returns a number for a model or a target."""
        return next(self._numbers)

    def check(self) -> None:
        """Raises ``ProcessLost`` where no call can be made any more."""
        if self._fate.failure_reason is not None:
            raise ProcessLost(self._fate.failure_reason)
        if self._fate.closing:
            raise ConfigError("the processes that held this model were closed: load it again.")

    def close(self) -> None:
        """Ends the processes that were started here, and leaves those that were not."""
        self._close()

    # -- calls -----------------------------------------------------------------------------------

    def call(self, call: Call, work: Callable[[], Done], *, to_its_end: bool = True) -> Done:
        """Returns what ``work`` does here, while the others make the call: for what is computed by
        all of them together.

        to_its_end: signals wait until it is over. Whoever left in the middle would leave the others
        in it, for good.
        """
        with self.turn:
            if self.inside:  # a part of another call
                return work()
            self.check()
            before = [*self._waiting]
            message = packed([*before, call])
            with _signals_waiting() if to_its_end else nullcontext():
                self.inside = True
                try:
                    del self._waiting[: len(before)]  # more may come at any time: see `forget`
                    send(message, self._group)
                    with torch.no_grad():
                        return work()
                except (OutpaceError, NotImplementedError):
                    raise  # before anything was computed: the others refuse it as well
                except Exception as error:
                    raise self._broken(error) from error
                except BaseException as error:
                    self._broken(error)
                    raise
                finally:
                    self.inside = False

    def note(self, call: Call, work: Callable[[], Done]) -> Done:
        """Returns what ``work`` does here. The others do the same before the next call: for what
        each of them does by itself. Work that fails is not sent."""
        with self.turn, _signals_waiting():
            self.check()
            done = work()
            self._waiting.append(call)
            return done

    def forget(self, number: int) -> None:
        """Lets the others forget a model or a target before the next call. May be called at any
        time, as the garbage collector does."""
        self._waiting.append(Call("forget", (number,)))

    def meet(self, step: str) -> None:
        """Returns when all processes have come to a step (`wait_at_barrier`), which may take them
        minutes."""
        self._store.set(_key(step, 0), "")
        keys = [_key(step, rank) for rank in range(1, self.count)]
        begin = time.monotonic()
        while not self._store.check(keys):
            self.check()
            if time.monotonic() - begin > START_TIMEOUT.total_seconds():
                raise ProcessLost(
                    f"of the {self.count} processes that hold the model not all have {step} within "
                    f"{START_TIMEOUT.total_seconds() / 60:.0f} minutes: load it again."
                )
            time.sleep(0.01)

    def _broken(self, error: BaseException) -> ProcessLost:
        """Returns the error of processes that no longer go together, and ends them."""
        others = is_about_others(error)
        begin = time.monotonic()
        while others and self._children and time.monotonic() - begin < NOTICING:
            if self._fate.failure_reason is not None:
                break
            time.sleep(0.01)
        if self._fate.failure_reason is None and others:
            self._fate.failure_reason = (
                f"one of the {self.count} processes that hold the model has ended, or has not "
                f"answered for {WAIT.total_seconds():.0f} seconds ({reason_of(error)}): load it "
                "again."
            )
        elif self._fate.failure_reason is None:
            self._fate.failure_reason = (
                f"the first of the {self.count} processes that hold the model failed in the middle "
                f"of a pass ({reason_of(error, named=True)}), in which the others wait for it: "
                "load it again."
            )
        for child in self._children:
            child.kill()
        return ProcessLost(self._fate.failure_reason)


def wait_at_barrier(store: Any, step: str, rank: int) -> None:
    """Says that this process, not the first one, has come to a step, and returns when that has."""
    store.set(_key(step, rank), "")
    store.wait([_key(step, 0)], START_TIMEOUT)


def _key(step: str, rank: int) -> str:
    return f"outpace/{step}/{rank}"


def _spawn(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a process that follows this one, and ends when its standard input does."""
    command = [sys.executable, "-c", _FOLLOW, json.dumps(sys.path)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )


def _watch(child: subprocess.Popen[bytes], rank: int, count: int, fate: _Fate) -> None:
    """Notes when a process has ended that should not have."""
    code = child.wait()
    if not fate.closing and fate.failure_reason is None:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        fate.failure_reason = (
            f"process {rank} of the {count} that hold the model has ended ({how}), and may have "
            "said why: load the model again."
        )


def _end(fate: _Fate, children: Sequence[subprocess.Popen[bytes]], owner: int) -> None:
    """Ends the processes. owner: the process that has started them; not one that it has forked."""
    if os.getpid() != owner:
        return
    fate.closing = True
    for child in children:
        if child.stdin is not None:
            with suppress(OSError):
                child.stdin.close()
    for child in children:
        try:
            child.wait(0 if fate.failure_reason else ENDING)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if distributed.is_initialized():
        with suppress(RuntimeError):  # others may be gone
            distributed.destroy_process_group()


@contextmanager
def _signals_waiting() -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM wait until the block is over."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals come to the main thread only
        return
    came: list[int] = []
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not None  # not Python's
    }
    for number in before:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(came):
            signal.raise_signal(late)
