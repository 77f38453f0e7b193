"""``outpace audit``: is the text really the target's? Five ways to know.

What imports torch, which takes seconds, is imported where it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from outpace.cli.audit_families import families
from outpace.cli.flags import options as opt
from outpace.cli.flags.grouped import Flags, grouped
from outpace.cli.flags.groups import SAMPLING, LlmFlags, SpeculationFlags
from outpace.cli.loading import ROWS, load_llm, starting
from outpace.cli.progress import counting
from outpace.cli.signals import sigterm_as_ctrl_c
from outpace.core.params import SamplingParams
from outpace.errors import ConfigError, IncompatibleRule, PromptError
from outpace.files import Record, holds_records, no_prompt, read_text, records

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="Prove, or refute, that speculation leaves the text's distribution alone. "
    "Exit code 1: refuted.",
)
app.command()(families)

Rules = Annotated[
    list[str] | None,
    typer.Option("--rule", metavar="NAME", help="Only this rule. May be given several times."),
]
Drafters = Annotated[
    list[str] | None,
    typer.Option("--drafter", metavar="NAME", help="Only this way of drafting; several times."),
]
Prompts = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help='One prompt per line; *.jsonl or *.json: {"prompt": ...} or {"prompt_token_ids": '
        "[...]}. Unset: a few built in; with --chat ten questions about code, maths and everyday "
        "things.",
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Prompts are a user's messages, given through the model's chat template, as instruct "
        "models expect them.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]


@app.command()
def distributions(
    rule: Rules = None,
    drafter: Drafters = None,
    full: Annotated[bool, typer.Option("--full", help="All shapes of drafts.")] = False,
    as_json: Json = False,
) -> None:
    """Enumerate every outcome of every rule on small vocabularies: total variation to 1e-12."""
    with starting():
        from outpace.audit.gate.enumeration import audit_distributions

    report = audit_distributions(rule or None, drafter or None, fast=not full)
    missing = sorted({*(rule or ())} - {row.rule for row in report.rows})
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} takes none of the ways of drafting that --drafter names, and "
            "was not enumerated: name others, or leave the rule out."
        )
    conclude(report, as_json)


@dataclass(frozen=True, kw_only=True)
class AuditedFlags(LlmFlags):
    """The model that is audited, and the drafter and rule that it has."""

    max_model_len: int | None

    def engine(self, speculation: SpeculationFlags, rows: int) -> Any:
        """Returns the engine to audit; ``ConfigError`` for arguments that do not fit."""
        from outpace.bench.session import check_arguments

        check_arguments(self.others, WITH_FLAGS)
        given = {**self.arguments(), "speculative_config": speculation.config(self.bundled)}
        return load_llm(self.model, given, {}, texts=rows, rows=rows)[0]


Sampled = Annotated[
    dict[str, Any], Flags(SamplingParams, SAMPLING, opt.SAMPLING, {"temperature": 1.0})
]
"""How the texts are sampled, but for their seeds."""


@dataclass(frozen=True, kw_only=True)
class GivenFlags:
    """What the texts go on from."""

    prompts: Prompts = None
    chat: Chat = False

    def listed(self, llm: Any) -> list[list[int]]:
        """Returns the token ids of the prompts, for a loaded model."""
        from outpace.audit.model import built_in_prompts

        return prompt_ids(llm, self.prompts, self.chat) or built_in_prompts(llm)


@app.command()
@grouped
@sigterm_as_ctrl_c()
def model(
    *,
    model: AuditedFlags,
    speculation: SpeculationFlags,
    given: GivenFlags,
    samples: Annotated[int, typer.Option(min=1, help="Texts to sample.")] = 1000,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest text. Unset: two rounds' worth.", show_default=False),
    ] = None,
    alpha: Annotated[
        float, typer.Option(help="Share of clean runs that may raise a false alarm.")
    ] = 1e-3,
    rows: Annotated[int, typer.Option(min=1, help="Texts decoded at once.")] = ROWS,
    sampled: Sampled,
    seed: Annotated[
        int, typer.Option(help="Seed of the first text; the others count up from it.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Bet against this model's speculation: is each token drawn from the distribution of plain
    decoding?

    Texts are sampled with speculation on, and every token is played against the distribution that a
    plain forward computes. The test may stop at any time, as at Ctrl-C or SIGTERM; see
    docs/audit.md.
    """
    speculation.config(model.bundled)  # refused before anything is imported
    check_alpha(alpha)
    with starting():
        from outpace.audit.model import AuditPlan, audit_model

    params = SamplingParams(**sampled)
    llm = model.engine(speculation, rows)
    plan = AuditPlan(given.listed(llm), samples, max_tokens, alpha, seed)
    with counting(Console(stderr=True), "audit model") as steps:
        report = audit_model(llm, plan, params, steps.counted)
    conclude(report, as_json)


@app.command()
@grouped
@sigterm_as_ctrl_c()
def diff(
    *,
    model: AuditedFlags,
    speculation: SpeculationFlags,
    given: GivenFlags,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest text.")] = 64,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Rounding, in logits. Unset: measured.", show_default=False),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of the coupled texts.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the first coupled text.")] = 0,
    as_json: Json = False,
) -> None:
    """Compare greedy and coupled texts with and without speculation; tell rounding from bugs.

    Ctrl-C or SIGTERM ends it with the texts that were compared.
    """
    speculation.config(model.bundled)  # refused before anything is imported
    with starting():
        from outpace.audit.diff import audit_diff

    if not temperature:
        raise ConfigError("--temperature is that of the coupled texts, which are drawn: give one.")
    llm = model.engine(speculation, ROWS)
    engines: dict[Any, Any] = {"greedy": llm}
    skipped = None
    try:
        engines["coupled"] = coupled_twin(llm, model.others)
    except IncompatibleRule as error:
        skipped = f"coupled: {error}"
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    prompts = given.listed(llm)
    with counting(Console(stderr=True), "audit diff") as steps:
        report = audit_diff(engines, prompts, params, tolerance, skipped, steps.counted)
    conclude(report, as_json)


@app.command()
def options(
    drafter: Drafters = None,
    rule: Rules = None,
    workers: opt.Workers = 0,
    as_json: Json = False,
) -> None:
    """Prove every sampling option under every drafter and rule, on a tiny model: honoured or
    refused.

    All of them take 10 to 20 minutes on two cores; name a drafter or a rule for less.
    """
    console = Console(stderr=True)
    with starting(console):
        from outpace.core.extras import lab_module
        from outpace.targets.cpu.threads import processors

        walk = lab_module("options.walk", "the walk over all options")

    with counting(console, "audit options") as steps:
        report = walk.audit_options(
            drafter or None, rule or None, workers=workers or processors(), report=steps.counted
        )
    conclude(report, as_json, walk.findings)


# -- what the verbs share ----------------------------------------------------------------------


WITH_FLAGS = {
    "model": "--model",
    "speculative_config": "the flags of speculation",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--rows, where there is one",
}
"""Arguments of ``LLM`` that have flags of their own."""


def coupled_twin(llm: Any, others: Mapping[str, Any]) -> Any:
    """Returns an engine on the same loaded target, with the same drafter, whose rule is coupled.

    others: further arguments of ``LLM`` that the first engine was given.
    """
    from outpace.bench.session import OF_LOADING
    from outpace.llm import LLM

    return LLM(
        llm.target,
        speculative_config=replace(llm.config, verify="coupled"),
        max_model_len=llm.max_model_len,
        max_num_seqs=llm.engine.target.max_rows,
        **{name: value for name, value in others.items() if name not in OF_LOADING},
    )


def prompt_ids(llm: Any, file: str | None, chat: bool) -> list[list[int]]:
    """Returns the prompts of a file, or of the built-in chats, as token ids; none of neither."""
    from outpace.bench.builtin import CHATS
    from outpace.inputs.chats import check_template

    if file is None and not chat:
        return []
    found = [text for *_, text in CHATS] if file is None else prompts_in(file)
    if not chat:
        return [llm.prompt_ids(prompt) for prompt in found]
    check_template(llm.tokenizer, llm.target.name, "leave --chat out", llm.target.processor)
    if not all(isinstance(prompt, str) for prompt in found):
        raise PromptError("--chat needs texts, and the prompt file holds token ids: leave it out.")
    return [llm.chat_ids([{"role": "user", "content": text}]) for text in found]


def prompts_in(file: str) -> list[Any]:
    """Returns the texts and lists of token ids of a prompt file."""
    lines = read_text(Path(file), "prompt file").split("\n")
    if holds_records(Path(file)):
        found = [_given(record) for record in records(lines, Path(file))]
    else:
        found = [line.rstrip("\r") for line in lines if line.strip()]
    if not found:
        raise no_prompt(Path(file), "prompt")
    return found


def _given(record: Record) -> str | list[int]:
    """The prompt of a record."""
    names = ("prompt", "prompt_token_ids")
    known = record.value if isinstance(record.value, dict) else {}
    found = next((known[name] for name in names if name in known), None)
    if not isinstance(found, str | list):
        raise PromptError(f'{record.where} has no "prompt" or "prompt_token_ids": give it one.')
    return found


def check_alpha(alpha: float) -> None:
    """Raises ``ConfigError`` for a rate of false alarms that is none."""
    if not 0 < alpha < 1:
        raise ConfigError(f"--alpha must be between 0 and 1, not {alpha}.")


def conclude(report: Any, as_json: bool, show: Callable[[Any], Any] | None = None) -> None:
    """Prints a report, or what ``show`` makes of it; leaves with 1 if it is bad, and as
    Ctrl-C does if that has ended it."""
    from outpace.audit.report import as_dict, findings, is_good

    if as_json:
        typer.echo(json.dumps(as_dict(report)))
    else:
        Console().print((show or findings)(report))
    if getattr(report, "stopped_of", None) is not None:
        raise KeyboardInterrupt
    if not is_good(report):
        raise typer.Exit(1)
