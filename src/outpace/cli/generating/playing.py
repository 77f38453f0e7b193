"""Runs what was asked for: streams one text, prints several, or writes JSON lines."""

from __future__ import annotations

import dataclasses
import json
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import typer
from rich.console import Console

from outpace.api import LLM
from outpace.bench.stats.replay import replay
from outpace.cli import report
from outpace.cli.flags.prompts import Entry
from outpace.cli.generating.compare import measure
from outpace.cli.texts import write
from outpace.core.params import SamplingParams
from outpace.core.stats import Metrics
from outpace.outputs import RequestOutput
from outpace.prompts import Prompt


@dataclass(frozen=True)
class Job:
    """What to do with which prompts."""

    entries: Sequence[Entry]
    chat: bool = False
    system: str | None = None
    plain: LLM | None = None
    """Plain decoding over the same target, if it is to be compared with."""
    as_json: bool = False
    stream: bool = True


def play(llm: LLM, params: SamplingParams, job: Job) -> None:
    """Generates and prints; raises ``typer.Exit(130)`` after Ctrl-C in a streamed text."""
    prompts = [prompt_of(llm, job, entry) for entry in job.entries]
    if llm.compile_seconds:
        done = "recorded" if llm.target.device.type == "cuda" else "compiled"
        typer.echo(f"passes {done} in {llm.compile_seconds:.1f} s", err=True)
    streamed = not job.as_json and len(prompts) == 1 and params.n == 1 and job.stream
    sampled = not llm.resolve(params).greedy
    if params.seed is None and (job.plain is not None or (streamed and sampled)):
        # Both sides of a comparison need the same one; and one that is told gives the text again.
        params = dataclasses.replace(params, seed=secrets.randbits(31))
    if job.as_json:
        _write_json(llm, params, job, prompts)
        return
    if streamed:
        _stream(llm, params, job, prompts[0])
    else:
        _print_all(llm, params, job, prompts)
    if job.plain is not None:
        _compare(llm, job.plain, params, prompts)
    lossy = replay(llm, prompts, params)
    if lossy is not None:
        typer.echo(lossy.sentence, err=True)


def prompt_of(llm: LLM, job: Job, entry: Entry) -> Prompt:
    """Returns a prompt as `LLM.generate` takes it: a text, or a chat's token ids."""
    if not job.chat:
        return entry.text
    system = [] if job.system is None else [{"role": "system", "content": job.system}]
    return llm.chat_ids([*system, {"role": "user", "content": entry.text}])


# -- texts ---------------------------------------------------------------------------------------


def _stream(llm: LLM, params: SamplingParams, job: Job, prompt: Prompt) -> None:
    seed = None if llm.resolve(params).greedy else params.seed
    chunks = llm.stream(prompt, params)
    show_prompt(job, job.entries[0])
    metrics = Metrics()
    try:
        for chunk in chunks:
            metrics = chunk.metrics
            write(chunk.text)
    except KeyboardInterrupt:
        typer.echo()
        typer.echo(f"interrupted; {report.cost(metrics, seed)}", err=True)
        raise typer.Exit(130) from None
    typer.echo()
    typer.echo(report.cost(metrics, seed), err=True)


def _print_all(llm: LLM, params: SamplingParams, job: Job, prompts: Sequence[Prompt]) -> None:
    begin = perf_counter()
    parts: list[Metrics] = []
    errors: list[str] = []
    for entry, output in zip(job.entries, llm.generate_each(prompts, params), strict=True):
        for completion in output.outputs:
            if parts:
                typer.echo()
            show_prompt(job, entry)
            write(completion.text + "\n")
            parts.append(completion.metrics)
            errors += [completion.error] if completion.error else []
    typer.echo(report.cost(report.merged(parts, perf_counter() - begin)), err=True)
    tell_errors(errors, len(parts))


def tell_errors(errors: Sequence[str], texts: int) -> None:
    """Ends with the mistake's exit code if a text could not be finished; the others are out."""
    if errors:
        typer.echo(f"outpace: {len(errors)} of {texts} texts ended early: {errors[0]}", err=True)
        raise typer.Exit(2)


def show_prompt(job: Job, entry: Entry) -> None:
    """Prints the prompt in front of its text, where somebody reads along."""
    # A reader wants the whole text; a pipe gets only what was generated.
    if sys.stdout.isatty() and not job.chat:
        typer.secho(entry.text, nl=False, dim=True)


# -- JSON ----------------------------------------------------------------------------------------


def _write_json(llm: LLM, params: SamplingParams, job: Job, prompts: Sequence[Prompt]) -> None:
    records = []
    errors: list[str] = []
    count = 0
    outputs = llm.generate_each(prompts, params)  # checks all prompts, generates on the way
    lossy = replay(llm, prompts, params)
    divergence = {} if lossy is None else {"divergence": lossy.as_dict()}
    for entry, output in zip(job.entries, outputs, strict=True):
        for record in _records(entry, output):
            count += 1
            errors += [record["error"]] if "error" in record else []
            if job.plain is not None:
                records.append(record)
            else:
                write_line(record | divergence)
    if job.plain is not None:
        comparison = measure(llm, job.plain, prompts, params, lambda text: None)
        write_line({"outputs": records, **comparison.as_dict(), **divergence})
    tell_errors(errors, count)


def _records(entry: Entry, output: RequestOutput) -> list[dict[str, Any]]:
    several = len(output.outputs) > 1
    return [report.record(entry, completion, several) for completion in output.outputs]


def write_line(record: dict[str, Any]) -> None:
    """Prints a record as a line of JSON."""
    # Escaped where the terminal or pipe could not carry the characters themselves.
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    typer.echo(json.dumps(record, ensure_ascii=not unicode))
    sys.stdout.flush()


# -- comparison ----------------------------------------------------------------------------------


def _compare(llm: LLM, plain: LLM, params: SamplingParams, prompts: Sequence[Prompt]) -> None:
    console = Console(stderr=True)
    comparison = measure(llm, plain, prompts, params, _teller(console))
    console.print(f"\n{comparison.what}:", highlight=False)
    console.print(comparison.table())
    for line in comparison.lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _teller(console: Console) -> Callable[[str], None]:
    # One line that replaces itself: a spinner would draw from a thread beside what is measured.
    if not console.is_terminal:
        return lambda text: None
    return lambda text: typer.echo(f"\r{text}", nl=False, err=True)
