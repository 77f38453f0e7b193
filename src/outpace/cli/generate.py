"""``outpace generate``: text from prompts, streamed, as JSON, or raced against plain decoding."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from outpace.cli.flags import options as opt
from outpace.cli.flags.grouped import grouped
from outpace.cli.flags.groups import (
    Beams,
    EngineFlags,
    Sampling,
    SpeculationFlags,
    Stopping,
    check_search,
)
from outpace.cli.flags.prompts import Entry, read_prompts
from outpace.cli.loading import ROWS, ChatTemplate, load_llm
from outpace.cli.printing import cost, id_of, merged, record, say, write, write_line
from outpace.cli.signals import sigterm_as_ctrl_c
from outpace.core.beam_params import BeamSearchParams
from outpace.core.params import SamplingParams
from outpace.core.stats import Metrics
from outpace.errors import ConfigError, OutpaceError, ParamsError, PromptError

if TYPE_CHECKING:
    from outpace.cli.compare import Comparison
    from outpace.inputs.prompts import Prompt
    from outpace.llm import LLM
    from outpace.outputs import BeamSearchOutput

COMPARED_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class PromptFlags:
    """Where the prompt comes from, and how it is meant."""

    prompt_file: opt.PromptFile = None
    chat: opt.Chat = False
    system: opt.System = None
    chat_template: opt.ChatTemplate = None


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """How many texts there are, and how they are shown."""

    n: opt.Number = 1
    compare: opt.Compare = False
    as_json: opt.Json = False
    no_stream: opt.NoStream = False
    logprobs: opt.Logprobs = None
    verbose: opt.Verbose = False


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

    def prompts(self, llm: LLM) -> list[Prompt]:
        """Returns the prompts as `LLM.generate` takes them: texts, or token ids of chats."""
        if not self.chat:
            return [entry.text for entry in self.entries]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [
            llm.chat_ids([*system, {"role": "user", "content": entry.text}])
            for entry in self.entries
        ]

    def show_prompt(self, entry: Entry) -> None:
        """Prints a prompt in front of its text, where somebody reads along."""
        # A reader wants the whole text; a pipe gets only what was generated.
        if sys.stdout.isatty() and not self.chat:
            typer.secho(entry.text, nl=False, dim=True)


@grouped
@sigterm_as_ctrl_c()
def generate(
    *,
    prompt: opt.Prompt = None,
    source: PromptFlags,
    engine: EngineFlags,
    speculation: SpeculationFlags,
    sampling: Sampling,
    beams: Beams,
    stopping: Stopping,
    output: OutputFlags,
) -> None:
    """Continue a prompt. The text goes to standard output, what it cost to standard error.

    Examples:

    `outpace generate --compare` (the bundled pair, and how much faster it is than one model)

    `outpace generate "Once upon a time" --temperature 0.8 --seed 7`

    `outpace generate -m big-model --draft small-model -k 5 < prompt.txt`

    `outpace generate -m big-model --method ngram --prompt-file prompts.jsonl --json`

    `outpace generate "Once upon a time" --num-beams 5 --n 3`

    `outpace generate --chat "Tell me a story." --max-tokens 200`
    """
    entries = read_prompts(prompt, source.prompt_file)
    arguments = engine.speculating(speculation)
    check_search(beams, output.compare, arguments["speculative_config"])
    _check(source, output, arguments["speculative_config"])
    options = {**sampling, **stopping, "n": output.n, "logprobs": output.logprobs}
    if output.compare and options["max_tokens"] is None:
        options["max_tokens"] = COMPARED_TOKENS
    texts, rows, searched = output.n * len(entries), ROWS, None
    if (width := beams["beam_width"]) is not None:
        asked = {**options, **beams}
        searched = BeamSearchParams(**{k: v for k, v in asked.items() if v is not None})
        options, arguments = {}, {**arguments, "speculative_config": {"method": "none"}}
        texts, rows = width * len(entries), max(ROWS, width)
    template = ChatTemplate(source.chat_template) if source.chat else None

    llm, params = load_llm(engine.model, arguments, options, texts, template, output.verbose, rows)

    plain = None
    if output.compare:
        from outpace.cli.compare import plain_llm

        plain = plain_llm(llm, arguments)
    stream = not output.no_stream
    job = Job(entries, source.chat, source.system, plain, output.as_json, stream)
    if searched is not None:
        search(searched, llm, job)
    else:
        run(llm, params, job)


def _check(source: PromptFlags, output: OutputFlags, config: dict[str, Any] | None) -> None:
    """Raises the error of flags that make no sense together."""
    error: OutpaceError | None = None
    if output.compare and (config or {}).get("method") == "none":
        error = ConfigError("--compare needs a drafter to compare: drop --method none.")
    elif source.system is not None and not source.chat:
        error = PromptError("--system needs --chat: a plain prompt has no system message.")
    elif source.chat_template is not None and not source.chat:
        error = PromptError("--chat-template needs --chat: a plain prompt has no template.")
    elif output.logprobs is not None and not output.as_json:
        error = ParamsError("--logprobs needs --json, which shows them.")
    if error:
        raise error


def run(llm: LLM, params: SamplingParams, job: Job) -> None:
    """Generates and prints; raises ``typer.Exit(130)`` after Ctrl-C in a streamed text."""
    from outpace.bench.divergence import replay

    prompts = job.prompts(llm)
    if llm.compile_seconds:
        done = "recorded" if llm.target.device.type == "cuda" else "compiled"
        typer.echo(f"passes {done} in {llm.compile_seconds:.1f} s", err=True)
    streamed = not job.as_json and len(prompts) == 1 and params.n == 1 and job.stream
    sampled = not llm.resolve(params).greedy
    if params.seed is None and (job.plain is not None or (streamed and sampled)):
        # Both sides of a comparison need the same one; and one that is shown gives the text again.
        params = dataclasses.replace(params, seed=secrets.randbits(31))
    if job.as_json:
        _write_json(llm, params, job, prompts)
        return
    if streamed:
        _stream(llm, params, job, prompts[0])
    else:
        _print_all(llm, params, job, prompts)
    if job.plain is not None:
        console = Console(stderr=True)
        comparison = _compared(llm, job.plain, params, prompts)
        console.print(f"\n{comparison.what}:", highlight=False)
        console.print(comparison.table())
        say(console, *comparison.lines)
    lossy = replay(llm, prompts, params)
    if lossy is not None:
        typer.echo(lossy.sentence, err=True)


def _stream(llm: LLM, params: SamplingParams, job: Job, prompt: Prompt) -> None:
    seed = None if llm.resolve(params).greedy else params.seed
    chunks = llm.stream(prompt, params)
    job.show_prompt(job.entries[0])
    metrics = Metrics()
    try:
        for chunk in chunks:
            metrics = chunk.metrics
            write(chunk.text)
    except KeyboardInterrupt:
        typer.echo()
        typer.echo(f"interrupted; {cost(metrics, seed)}", err=True)
        raise typer.Exit(130) from None
    typer.echo()
    typer.echo(cost(metrics, seed), err=True)


def _print_all(llm: LLM, params: SamplingParams, job: Job, prompts: Sequence[Prompt]) -> None:
    begin = perf_counter()
    parts: list[Metrics] = []
    errors: list[str] = []
    for entry, output in zip(job.entries, llm.generate_each(prompts, params), strict=True):
        for completion in output.outputs:
            if parts:
                typer.echo()
            job.show_prompt(entry)
            write(completion.text + "\n")
            parts.append(completion.metrics)
            errors += [completion.error] if completion.error else []
    typer.echo(cost(merged(parts, perf_counter() - begin)), err=True)
    _end_with(errors, len(parts))


def _write_json(llm: LLM, params: SamplingParams, job: Job, prompts: Sequence[Prompt]) -> None:
    from outpace.bench.divergence import replay

    records = []
    errors: list[str] = []
    count = 0
    outputs = llm.generate_each(prompts, params)  # checks all prompts, generates on the way
    lossy = replay(llm, prompts, params)
    divergence = {} if lossy is None else {"divergence": lossy.as_dict()}
    for entry, output in zip(job.entries, outputs, strict=True):
        for completion in output.outputs:
            count += 1
            errors += [completion.error] if completion.error else []
            found = record(entry, completion, several=len(output.outputs) > 1)
            if job.plain is not None:
                records.append(found)
            else:
                write_line(found | divergence)
    if job.plain is not None:
        comparison = _compared(llm, job.plain, params, prompts)
        write_line({"outputs": records, **comparison.as_dict(), **divergence})
    _end_with(errors, count)


def _end_with(errors: Sequence[str], texts: int) -> None:
    """Ends with the mistake's exit code if a text could not be finished; the others are out."""
    if errors:
        typer.echo(f"outpace: {len(errors)} of {texts} texts ended early: {errors[0]}", err=True)
        raise typer.Exit(2)


def _compared(
    llm: LLM, plain: LLM, params: SamplingParams, prompts: Sequence[Prompt]
) -> Comparison:
    """Measures plain against speculative decoding, and says before each run which one it is."""
    from outpace.cli.compare import measure

    # One line that replaces itself, without a terminal one after the other: a spinner would draw
    # from a thread while something is measured.
    replaces = Console(stderr=True).is_terminal

    def say(text: str) -> None:
        typer.echo(f"\r{text}" if replaces else text, nl=not replaces, err=True)

    return measure(llm, plain, prompts, params, say)


# -- beam search -----------------------------------------------------------------------------------


def search(params: BeamSearchParams, llm: LLM, job: Job) -> None:
    """Searches and prints the texts of each prompt, the best first."""
    prompts = job.prompts(llm)
    begin = perf_counter()
    outputs = llm.beam_search(prompts, params)
    seconds = perf_counter() - begin
    for entry, output in zip(job.entries, outputs, strict=True):
        _show_beams(entry, output, job)
    errors = [output.error for output in outputs if output.error is not None]
    texts = sum(len(output.sequences) for output in outputs)
    if not job.as_json:
        found = f"{texts} text{'' if texts == 1 else 's'}"
        typer.echo(f"{found} of {params.beam_width} beams in {seconds:.1f} s", err=True)
    _end_with(errors, texts + len(errors))


def _show_beams(entry: Entry, output: BeamSearchOutput, job: Job) -> None:
    known = {**id_of(entry), "prompt": entry.text}
    for index, sequence in enumerate(output.sequences):
        if job.as_json:
            write_line({**known, "index": index, **vars(sequence)})
        else:
            job.show_prompt(entry)
            write(sequence.text + "\n")
            typer.echo(f"log-probability {sequence.cum_logprob:.2f}", err=True)
    if job.as_json and output.error is not None:
        write_line({**known, "error": output.error})
