"""``outpace inspect``: what a file or folder is, which target it fits, and how it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outpace.cli.flags.options import Model, TrustRemoteCode
from outpace.cli.loading import starting
from outpace.cli.printing import for_command_line, harmless, say

if TYPE_CHECKING:
    from outpace.inspection import Inspection


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A model, GGUF file, trained head, adapter, datastore or classifier.",
        ),
    ],
    model: Model = None,
    trust_remote_code: TrustRemoteCode = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of lines.")
    ] = False,
) -> None:
    """Say what a file or folder is, whether it fits the --model as what drafts for it, and what to
    type, without reading weights.

    The exit code is 0, 1 for what is recognised and cannot be used, 2 for what is not there,
    damaged or unknown.

    `outpace inspect some-head -m big-model`
    """
    with starting(Console(stderr=True)):
        from outpace.inspection import inspect as inspected
    found = inspected(path, model, trust_remote_code)
    if json_output:
        typer.echo(json.dumps(found.as_dict(), allow_nan=False))
    else:
        show(found)
    if found.why_not is not None:
        raise typer.Exit(1)


def show(found: Inspection) -> None:
    """Prints what was found in lines."""
    console = Console()
    say(console, harmless(f"{found.path}: {found.what}"))
    lines = [(label(name), text(name, fact)) for name, fact in found.facts.items() if fact]
    if found.target is not None:
        lines.append(("fits the target", "no" if found.why_not else "yes"))
    if found.why_not is not None:
        lines.append(("why not", for_command_line(found.why_not)))
    lines += [("use it", command) for command in found.commands]
    width = max((len(name) for name, _ in lines), default=0)
    say(console, *(harmless(f"  {name:{width}}  {fact}") for name, fact in lines))


def label(name: str) -> str:
    return "size" if name == "bytes" else name.replace("_", " ")


def text(name: str, fact: Any) -> str:
    """Returns a fact as a person reads it."""
    if name == "bytes":
        return _bytes(fact)
    if isinstance(fact, bool):
        return "yes"
    if isinstance(fact, int):
        return f"{fact:,}"
    if isinstance(fact, Mapping):
        return ", ".join(f"{kind} {share:.0%}" for kind, share in fact.items())
    return ", ".join(map(str, fact)) if isinstance(fact, list) else str(fact)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
