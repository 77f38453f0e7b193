"""All families, each in a process of its own, so that none can stop the walk."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

from lab.families.listing import Family, Finding

_TRIAL = "lab.families.trial"


@dataclass(frozen=True)
class Limits:
    """What one family may take."""

    seconds: float = 300.0
    gigabytes: float = 6.0
    """Memory of the process that tries a family. Only Linux can be asked to see to it."""


def walk(
    families: Sequence[Family], limits: Limits, workers: int = 1, device: str = "cpu"
) -> Iterator[Finding]:
    """Yields a finding on every family as soon as it is there.

    workers: processes at once. device: where the models are.
    """
    with ThreadPoolExecutor(max(1, workers)) as pool:
        context = _context()
        waiting = [pool.submit(_guarded, context, family, limits, device) for family in families]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _context() -> Any:
    """Returns how processes are started: from one that has imported what all of them need, where
    the system has that."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_TRIAL])
    return context


def _guarded(context: Any, family: Family, limits: Limits, device: str) -> Finding:
    """Returns the finding of a process that tries one family, or what became of the process."""
    begin = perf_counter()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_try_apart, args=(there, family, limits, device), daemon=True)
    process.start()
    there.close()
    reason = "its process ended without a word"
    found = Finding(family.family, family.model, "not built", reason, kind=family.kind)
    try:
        while here.poll(max(0.0, begin + limits.seconds - perf_counter())):
            found = here.recv()
        found = replace(found, reason=f"it takes longer than {limits.seconds:g} s")
    except EOFError:
        process.join()
        if process.exitcode:
            found = replace(found, reason=f"its process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()
        here.close()
    return replace(found, seconds=perf_counter() - begin)


def _try_apart(results: Connection, family: Family, limits: Limits, device: str) -> None:
    """Sends findings on one family, each better than the one before it: the process may end at any
    time. Runs in a process of its own."""
    _be_quiet()
    import torch

    from lab.families.trial import findings

    torch.set_num_threads(1)  # as many processes as there are processors do the rest
    if _limits_memory(limits.gigabytes):
        for found in findings(family, device):
            results.send(found)
    else:
        results.send(_without_room(family, limits))
    results.close()


def _without_room(family: Family, limits: Limits) -> Finding:
    reason = f"a process that has only been started takes more than {limits.gigabytes:g} GB"
    return Finding(family.family, family.model, "not finished", reason, kind=family.kind)


def _be_quiet() -> None:
    """Drops what is printed: others' models warn of a lot that is meant for their users."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _limits_memory(gigabytes: float) -> bool:
    """Sets the limit, and returns whether there is any memory left: without any, whatever is tried
    fails, and not always for a reason that tells."""
    if sys.platform != "linux":
        return True
    import resource

    most = int(gigabytes * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    held = next(line for line in status.splitlines() if line.startswith("VmData:"))
    return int(held.split()[1]) * 1024 < most
