"""Bets are fair under their claim, win when it is false, and the alarm keeps its rate."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outpace.audit import sequential
from outpace.audit.sequential import (
    CURVED,
    LINEAR,
    Chances,
    Echoes,
    SequentialTest,
    Tables,
    Tilts,
    tilt_gains,
)

PROBS = np.array([0.5, 0.25, 0.15, 0.1])
EDGES = np.concatenate([[0.0], PROBS.cumsum()])


def mean_wealth(play, outcomes: np.ndarray) -> np.ndarray:
    """Returns each bet's mean wealth after one token, over the distribution ``outcomes``."""
    after = [np.exp(play(token).log_wealth) for token in range(len(outcomes))]
    return outcomes @ np.stack(after)


def tilted(token: int, slack: float = 0.0) -> Tilts:
    tilts = Tilts(slack)
    tilts.observe(EDGES[token], EDGES[token + 1])
    return tilts


def chanced(token: int, slack: float = 0.0) -> Chances:
    chances = Chances(slack)
    chances.observe(PROBS[1], token == 1)
    return chances


def echoed(token: int, slack: float = 0.0) -> Echoes:
    echoes = Echoes(slack)
    echoes.observe(0.9, EDGES[token], EDGES[token + 1])
    return echoes


def tabled(token: int, slack: float = 0.0) -> Tables:
    tables = Tables(slack)
    tables.observe("", PROBS, 2)
    tables.log_wealth = np.zeros_like(tables.log_wealth)
    tables.observe("", PROBS, token)
    return tables


@pytest.mark.parametrize("play", [tilted, chanced, echoed, tabled])
def test_a_bet_has_mean_one_under_the_claim(play) -> None:
    assert mean_wealth(play, PROBS) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("play", [tilted, chanced, echoed, tabled])
def test_with_slack_a_bet_is_fair_under_every_distribution_within_rounding(play) -> None:
    tau = 0.05
    for seed in range(20):
        shift = np.random.default_rng(seed).uniform(-tau, tau, len(PROBS))
        near = PROBS * np.exp(shift)
        near /= near.sum()
        wealth = mean_wealth(lambda token: play(token, math.expm1(2 * tau)), near)
        assert (wealth <= 1 + 1e-12).all()


def test_every_bet_wins_when_its_deviation_is_there() -> None:
    sharper = np.array([0.8, 0.1, 0.06, 0.04])
    gains = tilt_gains(EDGES[:-1], EDGES[1:], 0.0)
    assert (sharper @ gains).max() > 0.05
    assert len(LINEAR) + len(CURVED) == gains.shape[1]


def test_the_alarm_keeps_its_rate() -> None:
    """300 fair games at alpha = 0.05: 15 alarms are expected at most, 25 are two and a half
    standard deviations more."""
    generator = np.random.default_rng(5)
    alarms = 0
    for _ in range(300):
        test = SequentialTest(alpha=0.05)
        tilts = test.stake("rank", 0.5, Tilts())
        tables = test.stake("table", 0.5, Tables())
        for _ in range(40):
            token = int(generator.choice(len(PROBS), p=PROBS))
            tilts.observe(EDGES[token], EDGES[token + 1])
            tables.observe("", PROBS, token)
            test.settle()
        alarms += test.alarm
    assert alarms <= 25


def test_what_cannot_be_is_an_alarm_at_once() -> None:
    test = SequentialTest(alpha=1e-9)
    test.stake("rank", 1.0, Tilts())
    test.settle(impossible=True)
    assert test.alarm
    assert test.alarmed_at == 1
    assert test.p_value == 0.0


def test_an_alarm_stays_when_the_wealth_is_lost_again() -> None:
    test = SequentialTest(alpha=0.1)
    tilts = test.stake("rank", 1.0, Tilts())
    tilts.log_wealth = np.full_like(tilts.log_wealth, 5.0)
    test.settle()
    tilts.log_wealth = np.full_like(tilts.log_wealth, -5.0)
    test.settle()
    assert test.alarm
    assert test.p_value == pytest.approx(math.exp(-5))


def test_a_token_costs_as_many_sums_as_it_settles_bets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of texts has bets for each of their positions: a long text must not sum them all up
    for each of its tokens."""
    test, sums = SequentialTest(0.01), []
    tilts = [test.stake(f"position {at}", 1 / 50, Tilts()) for at in range(50)]
    test.settle()
    total = sequential.log_total
    monkeypatch.setattr(sequential, "log_total", lambda logs: sums.append(len(logs)) or total(logs))
    for one in tilts:
        one.observe(0.2, 0.4)
        test.settle()
    assert len(sums) == 2 * len(tilts)  # of the family that changed, and of all values
    mean = sum(np.exp(one.log_wealth).mean() for one in tilts) / len(tilts)
    assert test.log_wealth == pytest.approx(math.log(mean))
