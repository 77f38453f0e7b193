"""What the fuzz suite throws at outpace, and the only two things that may come back."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from outpace.errors import OutpaceError

LONG = os.environ.get("OUTPACE_FUZZ") == "long"
"""Set by ``make audit``: more examples, and other ones in each run."""
MORE = 10
PATIENCE = 60
"""Seconds of processor time after which a call counts as hung; each takes a fraction of one. Ten
times as much may pass on a clock: other programs may be running."""


def examples(count: int) -> settings:
    """Returns how many examples a test tries, and that it may take its time for each."""
    return settings(
        max_examples=count * MORE if LONG else count,
        derandomize=not LONG,
        deadline=None,
        print_blob=LONG,
        suppress_health_check=list(HealthCheck),
    )


class Hung(BaseException):
    """A call took longer than anybody would wait. No ``except Exception`` may swallow it."""


def answered(call: Callable[[], Any]) -> Any:
    """Returns what a call returns, or None where it raised an error that tells what to do.

    Every other exception passes, and so does `Hung`.
    """
    try:
        with _watched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers warns of odd configurations
            return call()
    except OutpaceError as error:
        check_sentence(str(error))
        return None


def check_sentence(text: str) -> None:
    """Asserts that an error message is one line of words that ends as a sentence does."""
    assert len(text.split()) >= 4, text
    assert "\n" not in text.strip(), text
    assert text.endswith((".", ")", "?")), text
    assert " at 0x" not in text, text
    assert len(text) < 1500, text


@contextmanager
def _watched() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Hung(f"no answer after {PATIENCE} s")

    timers = {signal.ITIMER_PROF: PATIENCE, signal.ITIMER_REAL: 10 * PATIENCE}
    before = [(kind, signal.signal(kind, stop)) for kind in (signal.SIGPROF, signal.SIGALRM)]
    for timer, seconds in timers.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for kind, handler in before:
            signal.signal(kind, handler)


class Odd:
    """An object of a class of the caller's own."""

    def __repr__(self) -> str:
        return "a repr\nof two lines"


NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**31, 2**63, 2**64, 10**9]),
    st.floats(),
    st.sampled_from([0.5, 1.0, 1e-300, 1e-7, 5e-324, 1e308]),
    st.booleans(),
    st.sampled_from([np.int64(3), np.float32(0.5), np.bool_(True), np.float64("nan")]),
    st.sampled_from([torch.tensor(3), torch.tensor(0.5), torch.tensor([1, 2])]),
    st.fractions(),
    st.decimals(),
    st.complex_numbers(),
)
TEXTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["auto", "none", "off", "true", "false", "w5", "", "a\ud800", "\0"]),
    st.binary(max_size=4),
)
ATOMS = st.one_of(st.none(), NUMBERS, TEXTS, st.builds(Odd), st.just(print), st.just(int))
ANYTHING = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers(-1, 70)), inner, max_size=3),
        st.sets(st.integers(-1, 70), max_size=3),
    ),
    max_leaves=5,
)
"""Values of every kind, most of them wrong wherever they are put."""

JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 70),
        st.sampled_from([2**40, 10**30, -(2**63)]),
        st.floats(),
        st.text(max_size=6),
        st.sampled_from(["auto", "llama", "float32", "false"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=4,
)
"""What a file of JSON may hold."""
