"""Our own engine as a contestant: speculative, and plain as the same engine with K = 0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from outpace.bench.run.contest import BatchJob, BatchTexts, Contestant
from outpace.core.params import SamplingParams
from outpace.llm import LLM
from outpace.outputs import CompletionOutput

Speculative = Literal["auto", "off"] | int | None


class Ours(Contestant):
    """One `LLM` under one setting of ``SamplingParams.speculative``."""

    ends_by_itself = True

    def __init__(
        self, llm: LLM, name: str, speculative: Speculative = None, *, shared: bool = False
    ) -> None:
        """shared: whether other contestants of the same run use this LLM, too, so that it has to
        forget their texts before each of its own."""
        self.llm = llm
        self._shared = shared
        self.name = name
        self.speculative = speculative
        self._tagged = llm.config.method == "tagged"
        self.plain = speculative in ("off", 0) or llm.config.method == "none"
        rule = llm.engine.verifier.rule
        self.rule = None if self.plain else rule.name
        self.lossless = self.plain or rule.lossless
        self.same_text_when_sampled = llm.engine.verifier.coupled
        self.what = f"outpace, {'plain' if self.plain else describe(llm, speculative)}"

    def forget_texts(self) -> None:
        self.llm.forget_texts()

    def run(self, job: BatchJob) -> BatchTexts:
        if self._shared:
            self.forget_texts()
        found = self._texts(job, self._params(job))
        return BatchTexts([out.token_ids for out in found], [out.metrics for out in found])

    def length(self, job: BatchJob) -> int:
        """Returns how many tokens the longest text of a job has before the target ends it."""
        params = [replace(each, ignore_eos=False) for each in self._params(job)]
        return max(len(out.token_ids) for out in self._texts(job, params))

    def _texts(self, job: BatchJob, params: list[SamplingParams]) -> list[CompletionOutput]:
        prompts = [list(prompt) for prompt in job.prompts[:: job.samples]]
        return [text for out in self.llm.generate(prompts, params) for text in out.outputs]

    def _params(self, job: BatchJob) -> list[SamplingParams]:
        """Options of each prompt, whose task is its tag where tags choose the drafter. Several
        texts of one have no seed where that would keep them from drafting for each other: what is
        drafted for a text with a seed follows from it alone."""
        tags = job.tasks[:: job.samples] if self._tagged else ()
        repeats = job.samples == 1 or self.plain or self.same_text_when_sampled
        return [
            SamplingParams(
                n=job.samples,
                temperature=job.temperature,
                max_tokens=job.most or job.max_tokens,
                ignore_eos=job.most is None,
                seed=job.seed + index if repeats else None,
                speculative=self.speculative,
                tag=tags[index] if tags else None,
            )
            for index in range(len(job.prompts) // job.samples)
        ]

    @property
    def nbytes(self) -> int:
        engine = self.llm.engine
        own = engine.target.weight_bytes + engine.target.cache_bytes
        return own if self.plain else own + engine.drafter.nbytes


def describe(llm: LLM, speculative: Speculative) -> str:
    """Returns drafter, draft length and rule in a line; of a path its last part: reports travel."""
    config = llm.config
    count = config.num_speculative_tokens if speculative is None else speculative
    options = ", ".join(
        f"{key}={Path(value).name if key == 'model' and isinstance(value, (str, Path)) else value}"
        for key, value in config.options.items()
    )
    options = f" ({options})" if options else ""
    return f"{config.method}{options}, K={count}, verify={llm.engine.verifier.rule.name}"
