"""The counters mean what their definitions say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outpace.core.stats import Metrics

ROUNDS = st.lists(
    st.integers(0, 5).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), min_size=1
)


def metrics_of(rounds: list[tuple[int, int]]) -> Metrics:
    """Returns the counters after rounds of (drafted, accepted) chains, each with one more token."""
    metrics = Metrics()
    for drafted, accepted in rounds:
        metrics.count_round(drafted, accepted, accepted + 1)
        metrics.count_positions(drafted, accepted)
    return metrics


@given(ROUNDS)
def test_acceptance_rate_is_accepted_over_drafted(rounds: list[tuple[int, int]]) -> None:
    drafted, accepted = (sum(column) for column in zip(*rounds, strict=True))
    assert metrics_of(rounds).acceptance_rate == (accepted / drafted if drafted else None)


@given(ROUNDS)
def test_mean_acceptance_length_is_emitted_over_passes(rounds: list[tuple[int, int]]) -> None:
    accepted = sum(a for _, a in rounds)
    assert metrics_of(rounds).mean_acceptance_length == (accepted + len(rounds)) / len(rounds)


@given(ROUNDS)
def test_acceptance_per_position_is_over_the_rounds_that_drafted_so_deep(
    rounds: list[tuple[int, int]],
) -> None:
    expected = []
    for level in range(max(d for d, _ in rounds)):
        deep = [accepted for drafted, accepted in rounds if drafted > level]
        expected.append(sum(accepted > level for accepted in deep) / len(deep))
    assert metrics_of(rounds).acceptance_per_position == expected


def test_a_round_cut_off_by_a_stop_counts_what_was_emitted() -> None:
    metrics = Metrics()
    metrics.count_round(drafted=4, accepted=2, emitted=2)
    assert (metrics.mean_acceptance_length, metrics.acceptance_rate) == (2.0, 0.5)


def test_nothing_counted_is_no_rate_and_not_an_error() -> None:
    metrics = Metrics()
    found = (metrics.acceptance_rate, metrics.mean_acceptance_length, metrics.tokens_per_second)
    assert found == (None, 0.0, 0.0)
    assert metrics.acceptance_per_position == []


def test_tokens_per_second_is_over_the_whole_time() -> None:
    metrics = Metrics(num_emitted_tokens=30, total_seconds=1.5, draft_seconds=0.5)
    assert metrics.tokens_per_second == 20.0


def test_nothing_is_judged_after_the_end_of_a_text() -> None:
    metrics = Metrics()
    metrics.count_positions(5, 3, ended=True)
    metrics.count_positions(5, 3)
    assert metrics.accepted_per_position == [2, 2, 2, 0, 0]
    assert metrics.judged_per_position == [2, 2, 2, 1, 0]


def test_two_requests_do_not_share_their_counters() -> None:
    one, other = Metrics(), Metrics()
    one.count_positions(2, 1)
    assert other.drafted_per_position == []


def test_the_published_names_are_these() -> None:
    published = metrics_of([(2, 1), (3, 3)]).as_dict()
    assert list(published) == [
        "num_target_passes",
        "num_draft_tokens",
        "num_accepted_tokens",
        "mean_acceptance_length",
        "acceptance_rate",
        "acceptance_per_position",
        "draft_seconds",
        "verify_seconds",
        "sample_seconds",
        "total_seconds",
        "tokens_per_second",
        "account",
    ]
    assert published["acceptance_per_position"] == [1.0, 0.5, 1.0]
