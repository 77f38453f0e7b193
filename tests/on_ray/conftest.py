"""Ray on this machine; without Ray the tests of this folder are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

LLM_OPTIONS = {"dtype": "float64", "device": "cpu", "max_num_seqs": 4, "threads": 1}
"""In float64 the company in which a text is written does not change it."""


@pytest.fixture(scope="session", autouse=True)
def _cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'outpace[ray]', or make ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def processes(words: str) -> list[psutil.Process]:
    """Returns the processes of this Ray that have some words in their names."""
    found = []
    for one in psutil.Process().children(recursive=True):
        try:
            if words in " ".join(one.cmdline()):
                found.append(one)
        except psutil.Error:  # it has just ended
            continue
    return found
