"""``outpace doctor``: what this machine can gain by speculation, and what to type."""

from __future__ import annotations

import json
from itertools import chain
from typing import Annotated, Any

import typer
from rich.console import Console

from outpace.cli.flags import options as opt
from outpace.cli.flags.grouped import grouped
from outpace.cli.flags.groups import ModelFlags
from outpace.cli.loading import starting
from outpace.cli.signs import working

DEFAULT_LENGTH = 5

Drafts = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        metavar="ID_OR_PATH",
        help="A smaller model, or a head that was trained for the model. May be given several "
        "times, to compare. Unset: look-ups alone; for the bundled pair, its drafter too.",
        rich_help_panel=opt.SPECULATION,
    ),
]
Length = Annotated[
    int,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        metavar="N",
        min=1,
        help="Tokens of the drafts of a model, at most.",
        rich_help_panel=opt.SPECULATION,
    ),
]
Longest = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=4,
        help="Tokens of a text, at most. Unset: 16 to 64, as many as 20 seconds allow for all "
        "texts of a drafter.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object with all figures, in plain units.")
]


@grouped
def doctor(
    *,
    model: ModelFlags,
    draft: Drafts = None,
    num_speculative_tokens: Length = DEFAULT_LENGTH,
    max_model_len: opt.MaxModelLen = None,
    max_tokens: Longest = None,
    json_output: Json = False,
) -> None:
    """Measure for a minute what this machine can gain by speculation, and say what to type.

    It says which processor and kernels compute which part of the model, how much memory is read in
    a second, what a pass over 1, 2, 4 and 8 tokens and a drafted token cost, what look-ups and each
    --draft would bring on code, chat and editing, and why, where something does not pay.

    `outpace doctor -m big-model --draft small-model`
    """
    console = Console(stderr=True)
    with starting(console):
        from outpace.bench.library import quiet
        from outpace.bench.run.diagnosis import Asked, measure
        from outpace.bench.run.findings import findings
        from outpace.cli.diagnosis import Advice, show

    drafts, longest = tuple(dict.fromkeys(draft or ())), num_speculative_tokens
    options = {**model.arguments(), "max_model_len": max_model_len}
    with working(console, "measuring") as report, quiet():
        found = findings(measure(Asked(model.model, options, drafts, longest, max_tokens), report))
    advice = Advice(found, drafts, _model_words(model), max_model_len)
    if json_output:
        commands = {"command": advice.command, "benchmark": advice.benchmark}
        typer.echo(json.dumps({**found.as_dict(), **commands}, allow_nan=False))
        return
    show(found, advice)


def _model_words(model: ModelFlags) -> list[str]:
    """The flags of the model that were given, as they are typed."""
    given: dict[str, Any] = {
        "-m": model.model,
        "--dtype": None if model.dtype == "auto" else model.dtype,
        "--device": None if model.device == "auto" else model.device,
        "--quantization": model.quantization,
        "--threads": model.threads,
    }
    words = [(flag, str(value)) for flag, value in given.items() if value is not None]
    trust = ["--trust-remote-code"] if model.trust_remote_code else []
    return [*chain.from_iterable(words), *trust]
