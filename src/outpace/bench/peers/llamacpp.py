"""llama.cpp and ik_llama.cpp as contestants on CPUs: plain, and speculative with a draft model, on
GGUF files."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outpace.bench.peers.llama_server import (
    CONTEXT,
    IK_LLAMA_CPP,
    LLAMA_CPP,
    LlamaServer,
    Program,
    samples,
)
from outpace.bench.peers.registry import Models, drafter_of, is_gguf
from outpace.bench.run.contest import BatchJob, BatchTexts, Contestant
from outpace.errors import ConfigError

UNKNOWN = -1
"""Stands for a token that a program does not tell; no vocabulary has it."""


class LlamaCpp(Contestant):
    """One server. Its cache holds 16-bit floats and its products round activations to 8 bits, both
    by its own defaults."""

    def __init__(self, program: Program, server: LlamaServer, count: int | None) -> None:
        self.name = program.name if count is None else f"{program.name}-speculative-{count}"
        self.what = f"{program.title}, {'plain' if count is None else f'{count} draft tokens'}"
        self._program, self._server, self._count = program, server, count

    def refusal(self, batch: int, temperature: float) -> str | None:
        return f"{self._program.title} is run with one text at a time here" if batch > 1 else None

    def run(self, job: BatchJob) -> BatchTexts:
        (prompt,) = job.prompts
        if len(prompt) + job.max_tokens > CONTEXT:
            raise ConfigError(
                f"{self._program.title} is run with a context of {CONTEXT} tokens here: lower "
                "--max-tokens or --max-prompt-tokens."
            )
        found = self._server.complete(samples(prompt, job.max_tokens, job.temperature, job.seed))
        drafted = found.get("timings", {}).get("draft_n")
        if self._count is not None and job.max_tokens > 2 and not drafted:
            raise ConfigError(
                f"{self._program.title} drafted nothing, and what it does plainly must not be "
                f"called speculative: take a newer llama-server, or leave {self.name!r} out of "
                "--vs."
            )
        tokens = found.get("tokens")
        if not tokens:
            tokens = self._read_again(str(found["content"]), int(found["tokens_predicted"]))
        return BatchTexts([[int(token) for token in tokens]])

    def _read_again(self, text: str, count: int) -> list[int]:
        """Returns the tokens of a text by a program that tells only how many it made. Read again,
        the text may have more or fewer tokens: what is missing counts as another token."""
        tokens = self._server.tokens(text, special=False)[:count]
        return tokens + [UNKNOWN] * (count - len(tokens))


def llamacpp(models: Models, variants: Sequence[str]) -> list[Contestant]:
    """Returns llama.cpp, plain or with a number of draft tokens, as each variant says."""
    return _contestants(LLAMA_CPP, models, variants)


def ik_llamacpp(models: Models, variants: Sequence[str]) -> list[Contestant]:
    """Returns the same of ik_llama.cpp."""
    return _contestants(IK_LLAMA_CPP, models, variants)


def _contestants(program: Program, models: Models, variants: Sequence[str]) -> list[Contestant]:
    _ = program.path  # the remedy comes before a model is loaded
    for path in filter(None, (models.target, models.drafter)):
        if not is_gguf(path):
            raise ConfigError(
                f"{program.title} reads GGUF files, and this run's model is {path!r}: give a .gguf "
                f"file, or leave {program.name!r} out of --vs."
            )
    if models.device != "cpu":
        raise ConfigError(
            f"the {program.title} peer runs on the CPU, and this run is on {models.device}: leave "
            f"{program.name!r} out of --vs."
        )
    threads = torch.get_num_threads()
    found: list[Contestant] = []
    for variant in variants:
        if variant == "plain":
            server = LlamaServer(program, models.target, None, 0, threads)
            found.append(LlamaCpp(program, server, None))
        else:
            count = int(variant.removeprefix("speculative-"))
            drafter = drafter_of(models, program.title)
            server = LlamaServer(program, models.target, drafter, count, threads)
            found.append(LlamaCpp(program, server, count))
    return found
