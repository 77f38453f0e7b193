"""Beam search for an ``LLM``: from prompts to the best texts of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outpace.core.beam_params import BeamSearchParams
from outpace.engine.beams.group import Group
from outpace.engine.beams.search import BeamSearch
from outpace.engine.engine import Engine
from outpace.errors import ParamsError
from outpace.intake import Intake
from outpace.outputs import BeamSearchOutput, BeamSearchSequence
from outpace.prompts import Prompt, text_of


class Beams:
    """Beam searches with the model of an engine, in rows of their own.

    The engine's rounds and the steps of a search take turns, so that threads may use both.
    """

    def __init__(self, engine: Engine, intake: Intake) -> None:
        self._engine = engine
        self._intake = intake

    def outputs(
        self, prompts: Sequence[Prompt], params: BeamSearchParams
    ) -> Iterator[BeamSearchOutput]:
        """Yields the output of each prompt, once it and those before it are done. What is wrong
        with prompts or params is raised at once."""
        self._check_room(params)
        options = [params.of_text()] * len(prompts)
        requests = self._intake.all_requests(prompts, options)
        vocabulary = self._engine.vocabulary
        params = params.resolve(self._intake.defaults)
        groups = [Group(request, params, vocabulary) for (request,) in requests]
        return self._play(prompts, groups, params)

    def _check_room(self, params: BeamSearchParams) -> None:
        rows = self._engine.target.rows
        if params.beam_width > rows:
            raise ParamsError(
                f"beam_width={params.beam_width} needs as many rows, and this LLM has {rows}: "
                f"lower it, or give LLM(..., max_num_seqs={params.beam_width})."
            )

    def _play(
        self, prompts: Sequence[Prompt], groups: Sequence[Group], params: BeamSearchParams
    ) -> Iterator[BeamSearchOutput]:
        engine = self._engine
        search = engine.between_rounds(lambda: self._begin(groups, params))
        for prompt, group in zip(prompts, groups, strict=True):
            while not group.done:
                engine.between_rounds(search.step)
            if group.error is not None and len(groups) == 1:
                raise group.error
            yield _output(prompt, group, params.returned)

    def _begin(self, groups: Sequence[Group], params: BeamSearchParams) -> BeamSearch:
        # No more rows than the prompts can need; those are only made as texts grow.
        rows = min(self._engine.target.rows, params.beam_width * len(groups))
        target = self._engine.target.another(rows)
        return BeamSearch(target, groups, params.beam_width, self._engine.max_batched_tokens)


def _output(prompt: Prompt, group: Group, returned: int) -> BeamSearchOutput:
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
