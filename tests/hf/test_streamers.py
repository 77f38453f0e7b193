"""The streamer of a ``generate`` call, which transformers keeps from ``custom_generate``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from .generating import BATCHES, Recorder, ends_of, faster, generated


@pytest.mark.parametrize("batch", BATCHES)
def test_the_streamer_is_given_what_generate_gives_it(batch: str) -> None:
    end = ends_of(generated(batch))
    plain, ours = Recorder(), Recorder()
    generated(batch, streamer=plain, eos_token_id=end)
    generated(batch, faster(), streamer=ours, eos_token_id=end)
    assert ours.ended == plain.ended == 1
    assert [piece.tolist() for piece in ours.pieces] == [piece.tolist() for piece in plain.pieces]


def logged(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def inner(*args: Any, **options: Any) -> Any:
        return call(*args, **options)

    return inner


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda custom: lambda *args, **options: custom(*args, **options),
    "method": lambda custom: custom.__call__,
    "partial": functools.partial,
    "decorated twice": lambda custom: logged(logged(lambda *a, **options: custom(*a, **options))),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_function_around_it_loses_no_token(name: str) -> None:
    plain, ours = Recorder(), Recorder()
    generated(streamer=plain)
    generated(custom=WRAPPERS[name](faster()), streamer=ours)
    assert ours.ended == 1
    assert [piece.tolist() for piece in ours.pieces] == [piece.tolist() for piece in plain.pieces]


def test_transformers_keeps_the_streamer_to_itself() -> None:
    """The day it does not, `arguments_of_generate` can go."""
    seen: dict[str, Any] = {}

    def custom(model: Any, input_ids: Any, **options: Any) -> Any:
        seen.update(options)
        return input_ids

    generated(custom=custom, streamer=Recorder())
    assert "generation_config" in seen
    assert seen.get("streamer") is None
