"""What a target is made of, and what may stand around one: no kind needs a class of its own."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from outpace import LLM
from outpace.core.request import EncoderInputs
from outpace.targets.base import PrefillChunk, PromptInputs, ScoreInputs, Scores, Target
from outpace.targets.hf.runner_hooks import PassInfo, RunnerHooks
from outpace.targets.hf.target import HFTarget

from .families import CONTEXT, PROMPTS, plain, target
from .generating import greedy, ids

LENGTH = 16


class Following(RunnerHooks):
    """Knows the rows, and every pass over them."""

    needs_layout = True

    def __init__(self) -> None:
        self.rows = 0
        self.passes: list[PassInfo] = []

    def admit(self, count: int, source: EncoderInputs | None) -> None:
        self.rows += count

    def fork(self, row: int) -> None:
        self.rows += 1

    def retain(self, rows: Sequence[int]) -> None:
        self.rows = len(rows)

    def reset(self) -> None:
        self.rows = 0

    @property
    def nbytes(self) -> int:
        return 100 * self.rows

    @contextmanager
    def around(self, given: PassInfo) -> Iterator[None]:
        self.passes.append(given)
        yield


def decoder(**options: Any) -> LLM:
    config = {"method": "ngram", "num_speculative_tokens": 3}
    given = {"speculative_config": config, "max_num_seqs": 2, "max_model_len": CONTEXT}
    return LLM(target("llama"), **given, **options)


def expected() -> list[list[int]]:
    return plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))


def test_an_extra_follows_all_rows_and_all_passes() -> None:
    llm, extra = decoder(), Following()
    runner: Any = llm.engine.target.runner  # type: ignore[attr-defined]
    runner.hooks.append(extra)
    runner._needs_layout = True
    before = runner.passes
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected()
    assert len(extra.passes) == runner.passes - before
    assert {len(given.starts) for given in extra.passes} == {1, 2}
    for given in extra.passes:
        assert given.layout is not None
        assert given.layout.positions.shape == (len(given.starts), given.columns)
        assert 0 <= given.num_committed < given.columns or given.columns == 1
    assert extra.rows == runner.active == 0
    runner.admit(2)
    assert extra.rows == 2
    assert runner.nbytes == runner.cache.nbytes + 200
    runner.reset()
    assert extra.rows == 0


class Leader(Target):
    """Makes each call and sends it to a follower as bytes, as rank 0 of a parallel model would."""

    def __init__(self, own: HFTarget, follower: HFTarget) -> None:
        self._own, self._follower = own, follower
        self.device, self.dtype = own.device, own.dtype
        self.max_rows, self.max_length = own.max_rows, own.max_length

    def _both(self, name: str, *given: Any) -> Any:
        sent = pickle.dumps((name, given))
        made = getattr(self._own, name)(*given)
        name, given = pickle.loads(sent)
        getattr(self._follower, name)(*given)
        return made

    def admit(self, inputs: PromptInputs) -> int:
        row: int = self._both("admit", inputs)
        return row

    def prefill(
        self, token_budget: int, layers: frozenset[int] = frozenset(), full: bool = False
    ) -> list[PrefillChunk]:
        read: list[PrefillChunk] = self._both("prefill", token_budget, layers, full)
        return read

    def fork(self, row: int, with_output: bool = False) -> int:
        new: int = self._both("fork", row, with_output)
        return new

    def score(self, inputs: ScoreInputs) -> Scores:
        scores: Scores = self._both("score", inputs)
        return scores

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self._both("commit", paths)

    def retain(self, rows: Sequence[int], texts: Mapping[int, Sequence[int]] | None = None) -> None:
        self._both("retain", rows, texts)

    def reset(self) -> None:
        self._both("reset")

    num_rows = property(lambda self: self._own.num_rows)  # type: ignore[assignment]
    num_ready_rows = property(lambda self: self._own.num_ready_rows)  # type: ignore[assignment]
    lengths = property(lambda self: self._own.lengths)  # type: ignore[assignment]
    weight_bytes = property(lambda self: self._own.weight_bytes)  # type: ignore[assignment]
    pass_bytes = property(lambda self: self._own.pass_bytes)  # type: ignore[assignment]
    lm_head_bytes = property(lambda self: self._own.lm_head_bytes)  # type: ignore[assignment]
    cache_bytes = property(lambda self: self._own.cache_bytes)  # type: ignore[assignment]


def test_a_follower_that_replays_the_calls_holds_the_same() -> None:
    llm = decoder()
    own: Any = llm.engine.target
    follower = HFTarget(target("llama"), rows=2, max_length=CONTEXT)
    leader = llm.engine.batch.target = Leader(own, follower)
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected()
    assert follower.runner.passes == own.runner.passes > 0
    leader.admit(PromptInputs(PROMPTS[0]))
    leader.prefill(1000, full=True)
    assert follower.lengths == own.lengths == [len(PROMPTS[0]) - 1]
    assert follower.num_ready_rows == own.num_ready_rows == 1
    leader.reset()
