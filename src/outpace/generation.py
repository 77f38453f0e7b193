"""Texts for an ``LLM``, sampled or searched with beams: its engine's rounds are run until all
requests of a call have ended."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from outpace.core.beam_params import BeamSearchParams
from outpace.engine.beams import BeamGroup, BeamSearch
from outpace.engine.engine import Engine
from outpace.engine.request import EngineRequest
from outpace.errors import ParamsError
from outpace.input_processor import InputProcessor
from outpace.inputs.prompts import Prompt, text_of
from outpace.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    Chunk,
    CompletionOutput,
    RequestOutput,
)


class Generation:
    """Plays rounds for whoever wants texts. Several threads may: a round serves all of them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()

    def outputs(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[EngineRequest]]
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

    def chunks(self, requests: Sequence[EngineRequest]) -> Iterator[Chunk]:
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

    def _leave(self, requests: Sequence[EngineRequest]) -> None:
        """Takes unfinished requests out of the batch: an interruption leaves nothing in it."""
        left = [request for request in requests if not request.finished]
        if left:
            self._engine.remove(*left)
        self._engine.flush()


def _raise_errors(requests: Iterable[EngineRequest]) -> None:
    for request in requests:
        if request.error is not None:
            raise request.error


def _output(request_id: str, prompt: Prompt, requests: Sequence[EngineRequest]) -> RequestOutput:
    outputs = [CompletionOutput.of(request, index) for index, request in enumerate(requests)]
    source = requests[0].source
    encoded = None if source is None else list(source.token_ids)
    return RequestOutput(request_id, text_of(prompt), requests[0].prompt_ids, outputs, encoded)


class BeamGeneration:
    """Beam searches with the model of an engine, in rows of their own.

    The engine's rounds and the steps of a search take turns, so that threads may use both.
    """

    def __init__(self, engine: Engine, input_processor: InputProcessor) -> None:
        self._engine = engine
        self._input_processor = input_processor

    def outputs(
        self, prompts: Sequence[Prompt], params: BeamSearchParams
    ) -> Iterator[BeamSearchOutput]:
        """Yields the output of each prompt, once it and those before it are done. What is wrong
        with prompts or params is raised at once."""
        self._check_room(params)
        options = [params.of_text()] * len(prompts)
        requests = self._input_processor.all_requests(prompts, options)
        vocabulary = self._engine.vocabulary
        params = params.resolve(self._input_processor.defaults)
        groups = [BeamGroup(request, params, vocabulary) for (request,) in requests]
        return self._run(prompts, groups, params)

    def _check_room(self, params: BeamSearchParams) -> None:
        rows = self._engine.target.max_rows
        if params.beam_width > rows:
            raise ParamsError(
                f"beam_width={params.beam_width} needs as many rows, and this LLM has {rows}: "
                f"lower it, or give LLM(..., max_num_seqs={params.beam_width})."
            )

    def _run(
        self, prompts: Sequence[Prompt], groups: Sequence[BeamGroup], params: BeamSearchParams
    ) -> Iterator[BeamSearchOutput]:
        engine = self._engine
        search = engine.run_between_rounds(lambda: self._begin(groups, params))
        for prompt, group in zip(prompts, groups, strict=True):
            while not group.done:
                engine.run_between_rounds(search.step)
            if group.error is not None and len(groups) == 1:
                raise group.error
            yield _beam_output(prompt, group, params.returned)

    def _begin(self, groups: Sequence[BeamGroup], params: BeamSearchParams) -> BeamSearch:
        # No more rows than the prompts can need; those are only made as texts grow.
        rows = min(self._engine.target.max_rows, params.beam_width * len(groups))
        target = self._engine.target.new_target(rows)
        return BeamSearch(target, groups, params.beam_width, self._engine.max_batched_tokens)


def _beam_output(prompt: Prompt, group: BeamGroup, returned: int) -> BeamSearchOutput:
    sequences = [
        BeamSearchSequence(
            text=text.request.text,
            token_ids=list(text.request.output_ids),
            cum_logprob=text.logprob,
            score=text.score,
            finish_reason=text.request.finish_reason,
            stop_reason=text.request.stop_reason,
        )
        for text in group.best.texts[:returned]
    ]
    error = None if group.error is None else str(group.error)
    return BeamSearchOutput(
        text_of(prompt),
        list(group.request.prompt_ids),
        [] if error else sequences,
        error,
    )
