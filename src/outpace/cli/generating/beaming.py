"""Runs ``outpace generate --num-beams``: prints the texts, the best first, or JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import typer

from outpace.api import LLM
from outpace.cli.flags.prompts import Entry
from outpace.cli.generating.playing import Job, prompt_of, show_prompt, tell_errors, write_line
from outpace.cli.texts import write
from outpace.core.beam_params import BeamSearchParams
from outpace.outputs import BeamSearchOutput


def params_of(options: Mapping[str, Any]) -> BeamSearchParams:
    """Returns the params of flags, of which None says nothing; ``ParamsError`` for one that a beam
    search cannot honour."""
    return BeamSearchParams(**{name: value for name, value in options.items() if value is not None})


def search(params: BeamSearchParams, llm: LLM, job: Job) -> None:
    """Searches and prints the texts of each prompt, the best first."""
    prompts = [prompt_of(llm, job, entry) for entry in job.entries]
    begin = perf_counter()
    outputs = llm.beam_search(prompts, params)
    seconds = perf_counter() - begin
    for entry, output in zip(job.entries, outputs, strict=True):
        _show(entry, output, job)
    errors = [output.error for output in outputs if output.error is not None]
    texts = sum(len(output.sequences) for output in outputs)
    if not job.as_json:
        found = f"{texts} text{'' if texts == 1 else 's'}"
        typer.echo(f"{found} of {params.beam_width} beams in {seconds:.1f} s", err=True)
    tell_errors(errors, texts + len(errors))


def _show(entry: Entry, output: BeamSearchOutput, job: Job) -> None:
    for index, sequence in enumerate(output.sequences):
        if job.as_json:
            known = {} if entry.id is None else {"id": entry.id}
            write_line({**known, "prompt": entry.text, "index": index, **vars(sequence)})
        else:
            show_prompt(job, entry)
            write(sequence.text + "\n")
            typer.echo(f"log-probability {sequence.cum_logprob:.2f}", err=True)
    if job.as_json and output.error is not None:
        known = {} if entry.id is None else {"id": entry.id}
        write_line({**known, "prompt": entry.text, "error": output.error})
