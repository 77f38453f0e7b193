"""Steps use fewer threads while other processes use the processors, and all again afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import nn

from outpace import LLM, SamplingParams
from outpace.targets.cpu import threads as contention
from outpace.targets.cpu.native import native
from outpace.targets.cpu.native_layers.linear import native_linear
from outpace.targets.cpu.threads import FIRST_REST, LONGEST_REST, WINDOW, ThreadLimit
from processes import START_SECONDS

STEP = WINDOW / 10


class Machine:
    """A clock, and a system that says how long threads have waited.

    share: of the time that each thread but one waits for a processor.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: int = 4) -> None:
        self.share, self.now, self.waited, self.wanted = 0.0, 0.0, 0.0, threads
        self.limit = ThreadLimit(lambda: self.now)
        monkeypatch.setattr(contention, "seconds_waited", lambda: self.waited)

    def steps(self, seconds: float) -> list[int]:
        """Returns how many threads each step has used."""
        used = []
        for _ in range(round(seconds / STEP)):
            with self.limit:
                used.append(torch.get_num_threads())
                self.now += STEP
                self.waited += STEP * self.share * (used[-1] - 1)
            assert torch.get_num_threads() == self.wanted
        return used


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield Machine(monkeypatch)
    torch.set_num_threads(before)


def test_a_quiet_machine_keeps_its_threads(machine: Machine) -> None:
    machine.share = 0.05
    assert set(machine.steps(50.0)) == {4}


def test_a_busy_machine_is_noticed_within_two_windows(machine: Machine) -> None:
    machine.share = 0.5
    used = machine.steps(3 * WINDOW)
    assert used[:10] == [4] * 10
    assert used == sorted(used, reverse=True)
    assert used[-1] == 1


def test_all_threads_come_back_once_it_is_quiet(machine: Machine) -> None:
    machine.share = 0.5
    machine.steps(3 * WINDOW)
    machine.share = 0.0
    machine.steps(2 * FIRST_REST + 2 * WINDOW)
    assert set(machine.steps(1.0)) == {4}


def test_trials_become_rare_where_it_stays_busy(machine: Machine) -> None:
    machine.share = 0.9
    used = machine.steps(20 * LONGEST_REST)
    assert sum(count > 1 for count in used) * STEP < 40 * WINDOW
    assert used[-1] == 1


def test_another_number_of_threads_is_taken_over(machine: Machine) -> None:
    machine.share = 0.9
    machine.steps(3 * WINDOW)
    torch.set_num_threads(2)
    machine.wanted = 2
    assert machine.steps(WINDOW) == [2] * 10
    torch.set_num_threads(1)
    machine.wanted = 1
    assert set(machine.steps(5.0)) == {1}


def test_the_number_of_threads_is_restored_after_an_error(machine: Machine) -> None:
    machine.share = 0.9
    machine.steps(3 * WINDOW)
    with pytest.raises(KeyError, match="1"), machine.limit:
        raise KeyError(torch.get_num_threads())
    assert torch.get_num_threads() == 4


def test_what_begins_while_a_step_has_few_threads_has_all(machine: Machine) -> None:
    """Torch gives a new thread of Python the number that holds at the moment."""
    machine.share = 0.9
    machine.steps(3 * WINDOW)
    found: list[int] = []

    def play() -> None:
        with ThreadLimit(lambda: machine.now):
            found.append(torch.get_num_threads())
        found.append(torch.get_num_threads())

    with machine.limit:
        assert torch.get_num_threads() == 1
        other = Thread(target=play)
        other.start()
        other.join()
    assert found == [4, 4]
    assert torch.get_num_threads() == 4


def test_one_thread_is_never_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "seconds_waited", lambda: 1 / 0)
    limit = ThreadLimit()
    for _ in range(3):
        with limit:
            assert torch.get_num_threads() == 1


WAITING = """
import os, time
from outpace.targets.cpu.threads import seconds_waited
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if os.fork() == 0:
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        pass
    os._exit(0)
before, end = seconds_waited(), time.monotonic() + 0.4
while time.monotonic() < end:
    pass
print(seconds_waited() - before)
"""


@pytest.mark.skipif(not contention.TASKS.exists(), reason="only Linux says how long threads wait")
def test_the_system_tells_how_long_threads_wait() -> None:
    """Two processes on one processor: each waits for about half of the time."""
    command = [sys.executable, "-c", WAITING]
    done = subprocess.run(
        command, capture_output=True, check=True, text=True, timeout=START_SECONDS
    )
    waited = float(done.stdout)
    assert 0.05 < waited < 0.6


def test_a_system_that_does_not_say_limits_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(contention, "TASKS", contention.TASKS / "missing")
    assert contention.seconds_waited() == 0.0


def test_a_thread_that_has_just_ended_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If all threads seemed never to have waited, a window after that would seem full of it."""
    for thread in ("1", "2", "3"):
        (tmp_path / thread).mkdir()
    for thread in ("1", "3"):
        (tmp_path / thread / "schedstat").write_text("9000000000 2000000000 7\n")
    monkeypatch.setattr(contention, "TASKS", tmp_path)
    assert contention.seconds_waited() == 4.0


def test_an_engine_decodes_within_the_limit(machine: Machine) -> None:
    llm = LLM(max_num_seqs=1, threads=4)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = llm.generate("Once", params)[0].token_ids
    llm.engine.target._limit = machine.limit
    seen = []
    with llm.engine.observing(lambda trace: seen.append(torch.get_num_threads())):
        machine.share = 0.9
        machine.steps(3 * WINDOW)
        assert llm.generate("Once", params)[0].token_ids == expected
    assert set(seen) == {1}
    assert torch.get_num_threads() == 4


@pytest.mark.skipif(native() is None, reason="no C++ compiler here")
@torch.inference_mode()
def test_the_number_of_threads_changes_no_bit() -> None:
    library = native()
    assert library is not None
    layer, x = native_linear(library, nn.Linear(512, 512)), torch.randn(5, 512)
    before, found = torch.get_num_threads(), []
    try:
        for count in (3, 2, 1):
            torch.set_num_threads(count)
            found.append(layer(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
