"""``outpace generate``: text from prompts, streamed, as JSON, or raced against plain decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outpace.cli.flags import options as opt
from outpace.cli.flags.grouped import grouped
from outpace.cli.flags.groups import (
    BeamFlags,
    EngineFlags,
    Sampling,
    SpeculationFlags,
    Stopping,
)
from outpace.cli.flags.prompts import read_prompts
from outpace.cli.flags.searching import check_search, searching
from outpace.cli.loading import ROWS, ChatTemplate, load_llm
from outpace.cli.termination import sigterm_as_ctrl_c
from outpace.errors import ConfigError, OutpaceError, ParamsError, PromptError

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


@grouped
@sigterm_as_ctrl_c()
def generate(
    *,
    prompt: opt.Prompt = None,
    source: PromptFlags,
    engine: EngineFlags,
    speculation: SpeculationFlags,
    sampling: Sampling,
    beams: BeamFlags,
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
    if beams.num_beams is not None:
        searched = searching({**options, **beams.params()})
        options, arguments = {}, {**arguments, "speculative_config": {"method": "none"}}
        texts, rows = beams.num_beams * len(entries), max(ROWS, beams.num_beams)
    template = ChatTemplate(source.chat_template) if source.chat else None

    llm, params = load_llm(engine.model, arguments, options, texts, template, output.verbose, rows)

    # It imports torch, which `load_llm` covers by a spinner.
    from outpace.cli.generating.compare import plain_beside
    from outpace.cli.generating.playing import Job, play

    stream = not output.no_stream
    plain = plain_beside(llm, arguments) if output.compare else None
    job = Job(entries, source.chat, source.system, plain, output.as_json, stream)
    if searched is not None:
        searched(llm, job)
    else:
        play(llm, params, job)


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
