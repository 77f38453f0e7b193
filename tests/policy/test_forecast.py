"""What is expected of the coming round, and of the rest of a text."""

from __future__ import annotations

import json

import pytest

from outpace.policy.forecast import Forecast, TextForecast

from .test_controller import request

MODEL = "model"


def written(texts: TextForecast, tokens: int, saved: float) -> None:
    """Plays a text."""
    row = request(1000)
    row.extend([2] * tokens)
    texts.note(row, MODEL, tokens, tokens * saved)


def test_what_a_model_saves_follows_from_this_text_and_the_last_ones() -> None:
    texts, row = TextForecast(), request()
    assert not texts.knows(MODEL)
    for saved in (0.0, 0.3):
        for _ in range(20):
            written(texts, 100, saved)
    assert texts.knows(MODEL)
    assert texts.saves(row, MODEL) == pytest.approx(0.3, abs=0.01)
    texts.note(row, MODEL, 200, 0.0)
    assert texts.saves(row, MODEL) < 0.05
    texts.note(row, MODEL, 200, -900.0)
    assert texts.saves(row, MODEL) == 0.0, "it need not draft"


def test_what_is_known_of_texts_can_be_kept() -> None:
    texts, again = TextForecast(), TextForecast()
    for _ in range(3):
        written(texts, 50, 0.2)
    kept = json.loads(json.dumps(texts.to_dict()))
    again.from_dict(kept)
    assert again.to_dict() == kept
    assert again.saves(request(), MODEL) == texts.saves(request(), MODEL)


def test_the_best_width_has_the_best_ratio() -> None:
    forecast = Forecast({0: 1.0, 1: 1.8, 2: 2.2}, {0: 1.0, 1: 1.2, 2: 1.6})
    assert (forecast.best, forecast.best_nonzero) == (1, 1)
    assert forecast.gain == pytest.approx(1.5)
    dear = Forecast({0: 1.0, 1: 1.1, 2: 1.2}, {0: 1.0, 1: 1.2, 2: 1.6})
    assert (dear.best, dear.best_nonzero, dear.gain) == (0, 1, 1.0)
