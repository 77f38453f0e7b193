"""Settings of the whole suite: one thread, nothing random between two runs, warnings are errors."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator
from typing import Any
from weakref import WeakSet

import pytest
import torch
from hypothesis import settings
from torch import nn

from outpace.bench.roofline import read_bandwidth
from outpace.targets.hf import trials
from outpace.targets.hf.loading import load

torch.set_num_threads(1)

settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=30)
settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """The libraries and the tests stay to the end: looking for garbage among their million objects
    again and again took a tenth of the whole time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_interrupts() -> Iterator[None]:
    """A shell starts its background jobs with Ctrl-C ignored, and what they start inherits that."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def _little_is_computed() -> Iterator[None]:
    """Processes that tests start have one thread, too: tests run side by side. And how fast half a
    gigabyte is read is measured by each benchmark, in a second, and tested by none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(read_bandwidth, "__defaults__", (8, 1))
        yield


@pytest.fixture(autouse=True)
def _same_global_generator() -> None:
    """Tests may draw tensors from the global generator; the library itself never does."""
    torch.manual_seed(0)


class _Probing:
    """The module `trials`, whose probe remembers the models that passed it.

    Most tests share a few models, and for each of them, whenever it is handed over anew, the probe
    would find the same as before; it takes as long as a short text. A model that has not passed is
    probed, and so is one that is read from a folder; `trials` itself is left as it is."""

    def __init__(self) -> None:
        self.passed: WeakSet[nn.Module] = WeakSet()

    def __getattr__(self, name: str) -> Any:
        return getattr(trials, name)

    def probe(self, model: nn.Module, coarse: bool = False) -> None:
        if model not in self.passed:
            trials.probe(model, coarse)
            self.passed.add(model)


@pytest.fixture(scope="session")
def _probing() -> _Probing:
    return _Probing()


@pytest.fixture(autouse=True)
def _no_model_is_probed_twice(_probing: _Probing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "trials", _probing)
