"""llama.cpp as a contestant on CPUs: plain, and speculative with a draft model, on GGUF files."""

from __future__ import annotations

import torch

from outpace.bench.peers.llama_server import CONTEXT, LlamaServer, program, samples
from outpace.bench.peers.registry import Models, is_gguf
from outpace.bench.run.contest import BatchJob, BatchTexts, Contestant
from outpace.errors import ConfigError

COUNTS = (3, 5)
"""Drafted tokens per round, a contestant for each; llama.cpp's own default is 3."""


class LlamaCpp(Contestant):
    """One server. Its cache holds 16-bit floats and its products round activations to 8 bits, both
    by its own defaults."""

    def __init__(self, server: LlamaServer, count: int | None) -> None:
        self.name = "llamacpp" if count is None else f"llamacpp-speculative-{count}"
        self.what = f"llama.cpp, {'plain' if count is None else f'{count} draft tokens'}"
        self._server, self._count = server, count

    def refusal(self, batch: int, temperature: float) -> str | None:
        return "llama.cpp is run with one text at a time here" if batch > 1 else None

    def run(self, job: BatchJob) -> BatchTexts:
        (prompt,) = job.prompts
        if len(prompt) + job.max_tokens > CONTEXT:
            raise ConfigError(
                f"llama.cpp is run with a context of {CONTEXT} tokens here: lower --max-tokens or "
                "--max-prompt-tokens."
            )
        found = self._server.complete(samples(prompt, job.max_tokens, job.temperature, job.seed))
        if not found.get("tokens"):
            raise ConfigError(
                "this llama-server returns no token ids, by which texts are compared: take a newer "
                "one, or leave 'llamacpp' out of --vs."
            )
        drafted = found.get("timings", {}).get("draft_n")
        if self._count is not None and job.max_tokens > 2 and not drafted:
            raise ConfigError(
                "llama.cpp drafted nothing, and what it does plainly must not be called "
                "speculative: take a newer llama-server, or leave 'llamacpp' out of --vs."
            )
        return BatchTexts([[int(token) for token in found["tokens"]]])


def contestants(models: Models) -> list[Contestant]:
    """Returns plain decoding and, with a drafter, speculative decoding with each count."""
    program()
    for path in filter(None, (models.target, models.drafter)):
        if not is_gguf(path):
            raise ConfigError(
                f"llama.cpp reads GGUF files, and this run's model is {path!r}: give a .gguf file, "
                "or leave 'llamacpp' out of --vs."
            )
    if models.device != "cpu":
        raise ConfigError(
            f"the llama.cpp peer runs on the CPU, and this run is on {models.device}: leave "
            "'llamacpp' out of --vs."
        )
    threads = torch.get_num_threads()
    found: list[Contestant] = [LlamaCpp(LlamaServer(models.target, None, 0, threads), None)]
    if models.drafter is not None:
        for count in COUNTS:
            server = LlamaServer(models.target, models.drafter, count, threads)
            found.append(LlamaCpp(server, count))
    return found
