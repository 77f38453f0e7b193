"""Predicted passes and speed-ups, against values worked out by hand and measured ones."""

from __future__ import annotations

from dataclasses import replace
from math import hypot, inf, isclose
from statistics import median

import pytest
from lab import predicted

from outpace.bench.machines import (
    A_CYCLE,
    OTHERS,
    Machine,
    PassWork,
    cpu,
    fitted,
    pass_seconds,
    predicted_times,
    tile_of,
)
from outpace.bench.statistics import AcceptanceCounts
from outpace.bench.theory import best_k_from_times, payoff, speedup_from_times

# 1 GB at 20 GB/s: 50 ms. 1.5 G multiply-adds on 2 cores of 75 G: 10 ms a column.
WORK, MACHINE = PassWork(1e9, 1.5e9), Machine(20e9, 75e9, 2, tile=4)


def test_seconds_of_passes_by_hand() -> None:
    """A tile's codes are spread in the time of two columns."""
    assert pass_seconds(WORK, MACHINE, 1) == pytest.approx(hypot(0.050, 0.030))
    assert pass_seconds(WORK, MACHINE, 4) == pytest.approx(hypot(0.050, 0.060))
    assert pass_seconds(WORK, MACHINE, 5) == pytest.approx(hypot(0.050, 0.090))
    assert pass_seconds(WORK, replace(MACHINE, multiply_adds=inf), 8) == pytest.approx(0.05)
    assert pass_seconds(WORK, replace(MACHINE, bandwidth=inf), 8) == pytest.approx(0.12)


def test_overheads_add_up_and_a_gpu_reads_two_bytes_a_weight() -> None:
    slow = replace(MACHINE, overhead=0.001, layer_overhead=0.0002)
    more = pass_seconds(replace(WORK, layers=10), slow, 1) - pass_seconds(WORK, MACHINE, 1)
    assert more == pytest.approx(0.003)
    gpu = Machine(3e12, inf, 1, dequantizes=True)
    assert pass_seconds(WORK, gpu, 1) == pytest.approx(1e-3)


@pytest.mark.parametrize("machine", OTHERS.values(), ids=list(OTHERS))
def test_more_of_a_machine_is_never_slower(machine: Machine) -> None:
    seconds = [pass_seconds(WORK, machine, columns) for columns in range(1, 40)]
    assert seconds == sorted(seconds)
    better = (
        replace(machine, bandwidth=2 * machine.bandwidth),
        replace(machine, multiply_adds=2 * machine.multiply_adds),
        replace(machine, cores=2 * machine.cores),
        replace(machine, tile=2 * machine.tile),
    )
    for each in better:
        assert all(pass_seconds(WORK, each, n) <= seconds[n - 1] for n in range(1, 40))


def test_units_of_a_cpu() -> None:
    found = cpu("AVX2", gigahertz=4.0, cores=8, bandwidth=60e9)
    assert (found.bandwidth, found.cores, found.tile) == (60e9, 8, 4)
    assert found.multiply_adds == A_CYCLE["AVX2"] * 4e9
    assert isclose(found.overhead, 0.5e-3)
    assert tile_of({"avx2", "avx512f"}) == 8
    assert tile_of({"avx2"}) == tile_of({"asimd"}) == 4


def test_a_machine_is_known_by_two_passes() -> None:
    like = replace(MACHINE, overhead=0.001, layer_overhead=0.0001)
    work = replace(WORK, layers=20)
    seconds = {n: pass_seconds(work, like, n) for n in (1, 2, 8)}
    found = fitted(work, seconds, replace(like, bandwidth=1.0, multiply_adds=1.0))
    assert found.bandwidth == pytest.approx(like.bandwidth)
    assert found.multiply_adds == pytest.approx(like.multiply_adds)


@pytest.mark.parametrize("seconds", [{1: 0.05, 8: 0.05}, {1: 0.05, 8: 0.04}, {1: 0.01, 8: 0.08}])
def test_any_two_measured_passes_make_a_machine(seconds: dict[int, float]) -> None:
    found = fitted(WORK, seconds, MACHINE)
    assert min(found.bandwidth, found.multiply_adds) > 0
    assert pass_seconds(WORK, found, 8) >= pass_seconds(WORK, found, 1) > 0


def test_times_of_drafts_and_of_scoring_them() -> None:
    slow = replace(MACHINE, overhead=0.001)
    draft = PassWork(0.2e9, 0.0)
    times = predicted_times(WORK, draft, slow, 3)
    assert times.draft == pytest.approx({1: 0.012, 2: 0.023, 3: 0.034})
    assert times.verify == {n: pass_seconds(WORK, slow, n) for n in (1, 2, 3, 4)}
    assert predicted_times(WORK, None, slow, 3).draft == pytest.approx(
        dict.fromkeys((1, 2, 3), 1e-3)
    )
    tree = predicted_times(WORK, draft, slow, 3, width=2.0)
    assert tree.draft == times.draft
    assert tree.verify[4] == pass_seconds(WORK, slow, 7)


def test_the_desktop_of_the_documentation() -> None:
    target, draft = PassWork(0.99e9, 1.54e9, 28), PassWork(0.3e9, 0.49e9, 24)
    times = predicted_times(target, draft, cpu("AVX2", 4.4, 8, 60e9), 8)
    k = best_k_from_times(0.8, times)
    assert k in (2, 3)
    assert speedup_from_times(0.8, k, times) == pytest.approx(1.4, abs=0.15)


# -- what was measured -----------------------------------------------------------------------------


def test_rounds_have_the_counts_that_they_are_made_of() -> None:
    counts = AcceptanceCounts(8, 4, 7, 3, (3, 2, 1), (2, 1, 1), (3, 2, 1))
    rounds = predicted.rounds_of(counts)
    assert [(each.drafted, each.accepted) for each in rounds] == [(3, 3), (2, 1), (1, 0)]
    assert predicted.width_of(counts) == pytest.approx(8 / 6)
    times = predicted_times(WORK, None, MACHINE, 3)
    assert payoff(rounds, times, times.verify[1], 3).tokens == pytest.approx(7 / 3)


def test_what_was_measured_is_predicted() -> None:
    """As docs/doctor.md says."""
    rows = predicted.compared()
    assert len(rows) == 106
    whole = [abs(row.error) for row in rows if row.task == "all"]
    assert max(whole) < 0.11
    assert sum(abs(row.error) <= 0.1 for row in rows) >= 92
    assert max(abs(row.error) for row in rows) < 0.175
    for machine in {row.machine for row in rows}:
        assert median(abs(row.error) for row in rows if row.machine == machine) < 0.085


def test_passes_that_were_timed_are_predicted() -> None:
    errors = predicted.pass_errors()
    assert {machine for machine, _ in errors} >= {"Xeon, AMX", "Xeon, VNNI", "Zen 5"}
    assert max(abs(error) for error in errors.values()) < 0.165
    assert max(abs(error) for (_, columns), error in errors.items() if columns <= 8) < 0.115


def test_the_table_of_the_documentation_is_that_of_the_script() -> None:
    page = (predicted.RESULTS.parent / "doctor.md").read_text()
    for line in predicted.table():
        assert line in page
