"""Texts for an ``LLM``: its engine's rounds are played until all requests of a call have ended."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from outpace.engine.engine import Engine
from outpace.engine.request import Request
from outpace.outputs import Chunk, CompletionOutput, RequestOutput
from outpace.prompts import Prompt, text_of


class Texts:
    """Plays rounds for whoever wants texts. Several threads may: a round serves all of them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()

    def outputs(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Request]]
    ) -> Iterator[RequestOutput]:
        """Yields the output of each prompt, once it and those before it are done. Raises the error
        of a request that is the only one.

        groups: the requests of each prompt.
        """
        requests = [request for group in groups for request in group]
        try:
            for request in requests:
                self._engine.add(request)
            for prompt, group in zip(prompts, groups, strict=True):
                while not all(request.finished for request in group):
                    self._engine.step()
                if len(requests) == 1:
                    _raise_errors(group)
                yield _output(str(next(self._ids)), prompt, group)
        finally:
            self._leave(requests)

    def chunks(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Yields pieces of the texts of one prompt while they grow; raises an error of any."""
        sent = [0] * len(requests)
        done = [False] * len(requests)
        try:
            for request in requests:
                self._engine.add(request)
            while not all(done):
                self._engine.step()
                _raise_errors(requests)
                for index, request in enumerate(requests):
                    if done[index]:
                        continue
                    # Another thread's step may write on meanwhile: the end, the text and the tokens
                    # are looked at in this order, so that none promises more than what follows it.
                    reason = request.finish_reason
                    text, ids = request.new_text(), request.output_ids[sent[index] :]
                    if text or reason is not None:
                        sent[index] += len(ids)
                        done[index] = reason is not None
                        yield Chunk(index, text, ids, reason, request.metrics)
        finally:
            self._leave(requests)

    def _leave(self, requests: Sequence[Request]) -> None:
        """Takes unfinished requests out of the batch: an interruption leaves nothing behind."""
        left = [request for request in requests if not request.finished]
        if left:
            self._engine.remove(*left)
        self._engine.settle()


def _raise_errors(requests: Iterable[Request]) -> None:
    for request in requests:
        if request.error is not None:
            raise request.error


def _output(request_id: str, prompt: Prompt, requests: Sequence[Request]) -> RequestOutput:
    outputs = [CompletionOutput.of(request, index) for index, request in enumerate(requests)]
    source = requests[0].source
    encoded = None if source is None else list(source.token_ids)
    return RequestOutput(request_id, text_of(prompt), requests[0].prompt_ids, outputs, encoded)
