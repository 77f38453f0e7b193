"""What is kept of a benchmark that fails on its way, and what is refused before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace import LLM
from outpace.bench.benchmark import Benchmark, SettingFailed
from outpace.bench.contest import BatchJob, BenchmarkPlan, OutpaceContestant
from outpace.bench.prompts import Prompt
from outpace.bench.synthetic import Pair, check_free
from outpace.errors import ConfigError, PromptError

PROMPTS = [Prompt("a", "t", "one"), Prompt("b", "u", "two")]


def plain_llm(pair: Pair, **options: int) -> LLM:
    config = {"method": "none"}
    return LLM(pair.target, speculative_config=config, generation_config="none", **options)


class FailsLater(OutpaceContestant):
    """Does no job at a temperature."""

    def run(self, job: BatchJob) -> object:  # type: ignore[override]
        if job.temperature:
            raise MemoryError("as large as this")
        return super().run(job)


def test_what_was_measured_before_an_error_is_kept(pair: Pair) -> None:
    llm = plain_llm(pair, max_num_seqs=2)
    takers = [OutpaceContestant(llm, "plain", "off"), FailsLater(llm, "other", "off")]
    plan = BenchmarkPlan(temperatures=(0.0, 1.0), max_tokens=8)
    with pytest.raises(SettingFailed) as broken:
        Benchmark(plan, PROMPTS, lambda text: list(text.encode()), takers).run()
    assert [setting.result.temperature for setting in broken.value.found] == [0.0]
    assert isinstance(broken.value.__cause__, MemoryError)


def test_prompts_that_leave_no_room_are_refused_before_anything_is_timed(pair: Pair) -> None:
    llm = plain_llm(pair, max_model_len=32)
    runs = Benchmark(
        BenchmarkPlan(max_tokens=16),
        [PROMPTS[0], Prompt("long", "t", "x" * 17)],
        lambda text: list(text.encode()),
        [OutpaceContestant(llm, "plain", "off")],
        tick=lambda name: pytest.fail("it has begun"),
    )
    with pytest.raises(PromptError, match="prompt long has 17 tokens, which leave no room for 16"):
        runs.run()


def test_a_pair_is_not_written_over_other_models(tmp_path: Path) -> None:
    check_free(tmp_path)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a model, which would be overwritten"):
        check_free(tmp_path)
    (tmp_path / "pair.json").write_text("{}")
    check_free(tmp_path)
