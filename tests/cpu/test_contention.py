"""Passes use fewer threads while other processes use the processors, and all again afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outpace.targets.cpu import contention
from outpace.targets.cpu.contention import FIRST_REST, WINDOW, ThreadLimit, times_taken_away
from outpace.targets.cpu.native import native
from outpace.targets.cpu.native_linear import native_linear


class Machine:
    """Takes the processor away so many times per call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.per_call, self.taken = 0.0, 0.0
        self.limit = ThreadLimit()
        monkeypatch.setattr(contention, "times_taken_away", lambda: int(self.taken))

    def calls(self, count: int, wanted: int = 4) -> list[int]:
        used = []
        for _ in range(count):
            used.append(self.limit.threads(wanted))
            self.taken += self.per_call if used[-1] > 1 else 0
        return used


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_quiet_machine_keeps_its_threads(machine: Machine) -> None:
    machine.per_call = 0.5
    assert set(machine.calls(1000)) == {4}


def test_a_busy_machine_is_noticed_within_some_calls(machine: Machine) -> None:
    machine.per_call = 100
    used = machine.calls(3 * WINDOW)
    assert used[:WINDOW] == [4] * WINDOW
    assert used == sorted(used, reverse=True)
    assert used[-1] == 1


def test_all_threads_come_back_once_it_is_quiet(machine: Machine) -> None:
    machine.per_call = 100
    machine.calls(3 * WINDOW)
    machine.per_call = 0
    assert set(machine.calls(FIRST_REST)[-WINDOW:]) <= {1, 2}
    assert machine.calls(20 * FIRST_REST)[-1] == 4


def test_trials_become_rare_where_it_stays_busy(machine: Machine) -> None:
    machine.per_call = 100
    used = machine.calls(1 << 16, wanted=2)
    assert sum(count > 1 for count in used) < 20 * (WINDOW + 1)
    assert used[-1] == 1


def test_one_thread_is_never_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "times_taken_away", lambda: 1 / 0)
    assert {ThreadLimit().threads(1) for _ in range(100)} == {1}


def test_the_system_counts() -> None:
    assert 0 <= times_taken_away() <= times_taken_away()


@pytest.mark.skipif(native() is None, reason="no C++ compiler here")
@torch.inference_mode()
def test_a_limit_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native()
    assert library is not None
    layer, x = native_linear(library, nn.Linear(512, 512)), torch.randn(5, 512)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = []
        for halvings in (0, 1, 2):
            limit = ThreadLimit()
            limit._halvings = halvings
            monkeypatch.setattr(library, "_limit", limit)
            assert limit.threads(3) == max(1, 3 >> halvings)
            found.append(layer(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
