"""The outputs of requests: finished texts and streamed chunks of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outpace.core.stats import Metrics
from outpace.engine.request import EngineRequest, FinishReason, Logprob


@dataclass(frozen=True)
class CompletionOutput:
    """One generated text."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]] | None
    """Per token: its own log-probability and those of the most probable ones; None if not asked."""
    seed: int | None
    """With the same seed and options the same text comes out again. None where no seed would do
    that: a sampled text for which none was given is drafted for as clocks and other texts suggest,
    and that decides which random numbers it meets. With method "none", and with "verify":
    "coupled", each text has one."""
    metrics: Metrics
    error: str | None = None
    """Why the text could not go on, with the finish reason "error"."""

    @classmethod
    def of(cls, request: EngineRequest, index: int) -> CompletionOutput:
        """Returns the output of a request as it stands."""
        return cls(
            index=index,
            text=request.text,
            token_ids=list(request.output_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=None if request.params.logprobs is None else _decoded(request),
            seed=request.seed if request.reports_seed else None,
            metrics=request.metrics,
            error=None if request.error is None else str(request.error),
        )

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of the whole text: the sum over its tokens; None if not asked."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(logprobs[token].logprob for token, logprobs in pairs)


def _decoded(request: EngineRequest) -> list[dict[int, Logprob]]:
    """Returns the log-probabilities with each token's text, where there is a tokenizer."""
    decoder = request.decoder
    if decoder is None:
        return list(request.logprobs)
    return [
        {
            token: replace(logprob, decoded_token=decoder.token(token))
            for token, logprob in logprobs.items()
        }
        for logprobs in request.logprobs
    ]


@dataclass(frozen=True)
class RequestOutput:
    """All texts generated from one prompt; the properties are those of the first."""

    request_id: str
    """A number that the `LLM` gives to each prompt, from "0" up."""
    prompt: str | None
    prompt_token_ids: list[int]
    """What was continued; of an encoder-decoder, what the decoder began with."""
    outputs: list[CompletionOutput]
    encoder_prompt_token_ids: list[int] | None = None
    """What the encoder has read, of an encoder-decoder; empty for audio."""

    @property
    def finished(self) -> bool:
        """Whether all texts have ended, which they have once `LLM.generate` returns them."""
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def text(self) -> str:
        """The first text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def metrics(self) -> Metrics:
        return self.outputs[0].metrics


@dataclass(frozen=True)
class BeamSearchSequence:
    """One of the best texts that a beam search has found."""

    text: str
    token_ids: list[int]
    """The tokens that were written, without those of the prompt."""
    cum_logprob: float
    """The sum of its tokens' log-probabilities, as the options change them."""
    score: float
    """The same, divided by the number of tokens to the power of the length penalty."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class BeamSearchOutput:
    """The best texts that a beam search has found for one prompt, the best first."""

    prompt: str | None
    prompt_token_ids: list[int]
    """What was continued; of an encoder-decoder, what the decoder began with."""
    sequences: list[BeamSearchSequence]
    """Fewer than were asked for where the options allow no more."""
    error: str | None = None
    """Why the search could not go on; there are no texts then."""


@dataclass(frozen=True)
class Chunk:
    """A streamed piece: text that no later token can change, and its tokens."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    metrics: Metrics
