"""What happens when a process is lost that holds a part of the model."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from engine.texts import SIZE, tokenizer, writer
from outpace import LLM
from outpace.errors import ConfigError, ProcessLost
from outpace.serve.listening import listen, make_runner, run_until_stopped
from outpace.serve.settings import Settings
from outpace.targets.hf.target import HFTarget
from outpace.targets.parallel import processes
from serve.conftest import call, running, wait_for
from targets.generating import greedy

from .following import Forked, following, split

EVEN = SIZE + 1


@contextmanager
def led(
    folder: Path, before: Callable[[], None] | None = None, **options: Any
) -> Iterator[tuple[LLM, Forked]]:
    with following(before) as (both, other):
        model = split(both, writer(EVEN), folder, tokenizer())
        options = {
            "speculative_config": {"method": "ngram"},
            "max_num_batched_tokens": 4,
            **options,
        }
        yield LLM(model, **options), other


def at(llm: LLM, name: str, number: int, do: Callable[[], None]) -> None:
    """Lets something happen when the first process begins a call for the n-th time."""
    target: Any = llm.engine.target
    plain, left = getattr(target._own, name), number

    def called(*given: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            do()
        return plain(*given)

    setattr(target._own, name, called)


@pytest.mark.parametrize(("name", "number"), [("prefill", 2), ("score", 3), ("commit", 3)])
def test_a_killed_process_ends_the_call(name: str, number: int, tmp_path: Path) -> None:
    """While a prompt is read, in a round, and between two rounds."""
    with led(tmp_path) as (llm, other):
        at(llm, name, number, other.kill)
        begin = time.monotonic()
        with pytest.raises(ProcessLost, match=r"process 1 of the 2 that hold the model has ended"):
            llm.generate("once upon a time", greedy(40))
        assert time.monotonic() - begin < 10
        with pytest.raises(ProcessLost, match="signal 9"):  # at once, and for good
            llm.generate(["one", "two"], greedy(4))
        assert llm.engine.target.failure_reason is not None
    assert not distributed.is_initialized()


def test_a_process_that_hangs_ends_the_call_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "WAIT", timedelta(seconds=2))
    with led(tmp_path) as (llm, other):
        at(llm, "score", 2, lambda: other.send(signal.SIGSTOP))
        begin = time.monotonic()
        with pytest.raises(ProcessLost, match="has not answered for 2 seconds"):
            llm.generate("once upon a time", greedy(40))
        assert time.monotonic() - begin < 10
        assert other.wait(5) == -signal.SIGKILL


def fail_in_the_third_round(said: Path) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    plain, left = HFTarget.score, [3]

    def score(self: HFTarget, plan: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise MemoryError("no memory is left")
        return plain(self, plan)

    HFTarget.score = score  # type: ignore[method-assign]


def test_a_process_without_memory_ends_the_call_and_says_why(tmp_path: Path) -> None:
    said = tmp_path / "said"
    raised = pytest.raises(ProcessLost, match="exit code 1")
    with led(tmp_path, partial(fail_in_the_third_round, said)) as (llm, _), raised:
        llm.generate("once upon a time", greedy(40))
    why = "process 1 of the 2 that hold the model ends: MemoryError: no memory is left"
    assert why in said.read_text()


def test_the_first_process_fails_in_a_pass(tmp_path: Path) -> None:
    with led(tmp_path) as (llm, other):
        runner: Any = llm.engine.target

        def fail(*given: Any, **named: Any) -> Any:
            raise MemoryError("no memory is left")

        runner._own.runner.forward = fail
        with pytest.raises(ProcessLost, match="failed in the middle of a pass"):
            llm.generate("once upon a time", greedy(4))
        assert other.wait(5) == -signal.SIGKILL


def test_there_is_one_such_model_at_a_time_and_none_after_it_was_closed(tmp_path: Path) -> None:
    with led(tmp_path) as (llm, other):
        with pytest.raises(ConfigError, match="one of these at a time"), following():
            pass
        split_model: Any = llm.target
        split_model.processes.close()
        assert other.wait(5) == 0
        with pytest.raises(ConfigError, match="were closed"):
            llm.generate("once", greedy(4))


# -- the server ------------------------------------------------------------------------------------


def test_a_server_answers_as_one_process_does(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {
            "prompt": f"once upon {number}",
            "max_tokens": 8,
            "seed": number,
            "temperature": number % 2,
        }
        for number in range(8)
    ]
    config = {"method": "ngram", "prompt_lookup_min": 1, "verify": "coupled"}
    found = []
    with led(tmp_path, speculative_config=config, max_num_seqs=4) as (two, _):
        for llm in (LLM(writer(EVEN), tokenizer=tokenizer(), speculative_config=config), two):
            with running(llm) as url:
                answers = [call(url, "/v1/completions", body) for body in bodies]
            found.append(
                [body["choices"][0]["text"] for status, body, _ in answers if status == 200]
            )
    assert found[0] == found[1]
    assert len(found[0]) == len(bodies)


def test_a_server_that_has_lost_a_process_says_so_and_ends(tmp_path: Path) -> None:
    settings = Settings(model_name="tiny", port=0)
    import threading

    with led(tmp_path) as (llm, other):
        listening = listen(settings)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        runner, ended = make_runner(llm, settings), []
        seen: list[tuple[int, str]] = []
        on_tick = runner.on_tick

        async def asked_before(counter: int) -> bool:
            if llm.engine.target.failure_reason is None or seen:
                return await on_tick(counter)
            return False

        def serve() -> None:
            try:
                run_until_stopped(runner, listening)
            except ProcessLost as error:
                ended.append(str(error))

        runner.on_tick = asked_before  # type: ignore[method-assign]
        thread = threading.Thread(target=serve)
        thread.start()
        wait_for(lambda: runner.started)
        assert call(url, "/ready")[0] == 200
        other.kill()
        wait_for(lambda: llm.engine.target.failure_reason)
        status, body, _ = call(url, "/ready")
        answered, answer, _ = call(url, "/v1/completions", {"prompt": "once", "max_tokens": 4})
        seen.append((status, body["error"]["code"]))
        wait_for(lambda: not thread.is_alive())
    assert seen == [(503, "process_lost")]
    assert (answered, answer["error"]["code"]) == (503, "process_lost")
    assert "process 1 of the 2" in ended[0]


def test_signals_are_raised_when_a_call_is_over() -> None:
    came: list[str] = []

    def work() -> None:
        with processes._signals_waiting():
            os.kill(os.getpid(), signal.SIGINT)
            came.append("went on")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert came == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
