"""Processes that follow, forked from one that imports everything once: a start of Python with torch
takes longer than all that most tests do with them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.parallel import processes
from outpace.targets.parallel.follower import follow_to_the_end
from outpace.targets.parallel.load import ShardSpec, SplitModel, read_split
from outpace.targets.parallel.processes import Processes

COUNT = 2


def _main(environment: Mapping[str, str], alive: Any, before: Callable[[], None] | None) -> None:
    """alive: a pipe whose other end the first process holds. before: what is changed before."""
    os.environ.update(environment)
    torch.set_num_threads(1)

    def watch() -> None:
        try:
            alive.recv()
        except EOFError:
            os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    if before is not None:
        before()
    follow_to_the_end()


class Forked:
    """As much of ``Popen`` as `processes` uses."""

    def __init__(self, environment: Mapping[str, str], before: Callable[[], None] | None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with pytest.MonkeyPatch.context() as patch:  # where it looks for this module
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            forkserver.ensure_running()
        theirs, self.stdin = context.Pipe(duplex=False)
        self._process = context.Process(target=_main, args=(environment, theirs, before))
        self._process.start()
        theirs.close()
        self.pid = self._process.pid
        self._ended = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self._process.join()
        self._ended.set()

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a process that follows", timeout or 0)
        code: int = self._process.exitcode
        return code

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        if not self._ended.is_set():
            os.kill(self.pid, number)


@contextmanager
def following(before: Callable[[], None] | None = None) -> Iterator[tuple[Processes, Forked]]:
    """Yields two processes, this one and one that follows it, and the latter. before: what that one
    changes of itself first."""
    children: list[Any] = []

    def spawn(environment: Mapping[str, str]) -> Any:
        children.append(Forked(environment, before))
        return children[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_spawn", spawn)
        both = Processes(COUNT, torch.device("cpu"))
    try:
        yield both, children[0]
    finally:
        both.close()
        children[0].wait(20)


def split(both: Processes, model: Any, folder: Path, tokenizer: Any = None) -> SplitModel:
    """Returns a model that both processes hold together, after it was saved in a folder."""
    model.save_pretrained(folder)
    return read_split(both, ShardSpec(str(folder), model.dtype, False, COUNT), tokenizer, 1)


def whole(model: nn.Module, tokenizer: Any = None) -> LoadedModel:
    """Returns the same model as this process alone holds it."""
    return LoadedModel(model, tokenizer, "whole")
