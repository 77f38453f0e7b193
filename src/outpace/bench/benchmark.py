"""The benchmark: at each batch size and temperature, all contestants on the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from outpace.bench.contest import (
    BASELINE,
    BatchJob,
    BenchmarkPlan,
    Clock,
    Contestant,
    OutpaceContestant,
    Tick,
)
from outpace.bench.prompts import Prompt, batches
from outpace.bench.setting import Instruments, MeasuredSetting, Setting, Work
from outpace.core.progress import silent
from outpace.errors import ConfigError, PromptError
from outpace.inputs.prompts import ChatIds


class SettingFailed(Exception):
    """A setting failed after others, which are here; its error is the ``__cause__``."""

    def __init__(self, found: Sequence[MeasuredSetting]) -> None:
        super().__init__("a setting could not be measured")
        self.found = list(found)


@dataclass(frozen=True)
class Benchmark:
    """Prompts, contestants and a plan; one of the contestants is called "plain", the baseline."""

    plan: BenchmarkPlan
    prompts: Sequence[Prompt]
    encode: Callable[[str], list[int]]
    contestants: Sequence[Contestant]
    whole: bool = False
    """Whether a prompt that is too long is refused, instead of cut at its beginning: a chat's
    template must not lose its first tokens."""
    bandwidth: float | None = None
    """Bytes per second, None where it was not measured."""
    clock: Clock = perf_counter
    tick: Tick = silent

    def run(self) -> list[MeasuredSetting]:
        """Runs all settings one after another, the sweep at the first. After Ctrl-C those that
        were run, the last of them in part; ``KeyboardInterrupt`` where there is none.
        `SettingFailed` where a later setting fails, and ``PromptError`` for prompts that leave no
        room for as many tokens as are asked for."""
        if BASELINE not in [c.name for c in self.contestants]:
            raise ConfigError("a benchmark needs the contestant 'plain' to compare with.")
        self._check_room()
        tools = Instruments(self.bandwidth, self.clock, self.tick)
        found: list[MeasuredSetting] = []
        for number, (batch, temperature) in enumerate(self.plan.settings):
            work = self._work(batch, temperature)
            setting = Setting(self.plan, work, self.contestants, tools)
            try:
                found.append(setting.measure(with_sweep=number == 0))
            except KeyboardInterrupt:
                if not found:
                    raise
                break
            except Exception as error:
                if not found:
                    raise
                raise SettingFailed(found) from error
            if found[-1].result.stopped_of is not None:
                break
        return found

    def _check_room(self) -> None:
        ours = [
            one.llm.max_model_len for one in self.contestants if isinstance(one, OutpaceContestant)
        ]
        if self.plan.to_end or not ours:
            return
        for prompt in self.prompts:
            tokens = len(self._ids(prompt))
            if tokens + self.plan.max_tokens > min(ours):
                raise PromptError(
                    f"prompt {prompt.id} has {tokens} tokens, which leave no room for "
                    f"{self.plan.max_tokens} more in a context of {min(ours)}: lower "
                    "--max-prompt-tokens or --max-tokens."
                )

    def ticks(self) -> int:
        """Returns how often `tick` will be called at most."""
        total = 0
        for batch, _ in self.plan.settings:
            jobs = len(self._batches(batch))
            total += len(self.contestants) * (jobs * self.plan.pace.repeats + self.plan.pace.warmup)
        sweep = (len(self.plan.sweep) + 1) if self.plan.sweep else 0
        return total + sweep * len(self._batches(self.plan.batches[0]))

    # -- the jobs of a setting -------------------------------------------------------------------

    def _work(self, batch: int, temperature: float) -> Work:
        prompts = self._batches(batch)
        jobs = [self._job(of_job, temperature) for of_job in prompts]
        if self.plan.to_end:
            jobs = [self._ended(job) for job in jobs]
        left_over = len(self.prompts) - sum(map(len, prompts)) // self.plan.samples
        return Work(batch, temperature, prompts, jobs, left_over)

    def _batches(self, size: int) -> list[list[Prompt]]:
        """The prompts of each job, each as often as it has texts."""
        samples = self.plan.samples
        found = batches(self.prompts, size // samples)
        return [[prompt for prompt in batch for _ in range(samples)] for batch in found]

    def _job(self, prompts: Sequence[Prompt], temperature: float) -> BatchJob:
        found = [self._ids(prompt) for prompt in prompts]
        rows = tuple(ids if isinstance(ids, ChatIds) else tuple(ids) for ids in found)
        if not all(rows):
            raise PromptError("a prompt is empty once it is tokenised.")
        tasks = tuple(prompt.task for prompt in prompts)
        plan = self.plan
        return BatchJob(
            rows, plan.max_tokens, temperature, plan.seed, samples=plan.samples, tasks=tasks
        )

    def _ended(self, job: BatchJob) -> BatchJob:
        """The job with as many tokens as plain decoding writes before the target ends its texts; of
        a batch, those of the longest. A greedy text alone ends by itself there."""
        plain = next(c for c in self.contestants if c.name == BASELINE)
        if not isinstance(plain, OutpaceContestant):
            raise ConfigError("--to-end needs plain decoding by outpace, which finds the ends.")
        length = plain.length(job)
        alone = len(job.prompts) == 1 and job.temperature == 0 and length > 1
        return replace(job, max_tokens=max(2, length), most=job.max_tokens if alone else None)

    def _ids(self, prompt: Prompt) -> list[int]:
        ids, longest = self.encode(prompt.text), self.plan.max_prompt_tokens
        if self.whole and len(ids) > longest:
            raise PromptError(
                f"prompt {prompt.id} has {len(ids)} tokens with its chat template, and a chat "
                f"cannot be cut to {longest}: raise --max-prompt-tokens, or leave it out."
            )
        return ids if len(ids) <= longest else ids[-longest:]
