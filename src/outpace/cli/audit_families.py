"""``outpace audit families``: every kind of model that transformers lists, tried out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outpace.cli.flags.options import Workers
from outpace.cli.loading import starting
from outpace.cli.progress import counting
from outpace.errors import ConfigError

WHAT = "the walk over all families"


def families(
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE", help="A model_type, such as llama. May be given several times."
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="causal, seq2seq, speech or image-text. May be given several times. Unset: all.",
        ),
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all findings as JSON.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the findings as a page.")
    ] = None,
    workers: Workers = 0,
    seconds: Annotated[float, typer.Option(min=1, help="Time limit of one family.")] = 300.0,
    gigabytes: Annotated[
        float, typer.Option(min=1, help="Memory limit of one family (on Linux).")
    ] = 6.0,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Where the models are: cpu, cuda or cuda:1.")
    ] = "cpu",
) -> None:
    """Try a tiny random model of every family that transformers lists: is the text the plain one?

    Each is identical, refused with the reason, or DIFFERENT, which is a defect; one that was not
    finished in time shows nothing, and the exit code is 1 then, too. It takes some ten minutes on
    two cores.
    """
    console = Console(stderr=True)
    with starting(console):
        from outpace.bench.outputs import check_file
        from outpace.core.extras import lab_module
        from outpace.targets.cpu.threads import processors
        from outpace.targets.hf.loading.placing import pick_device

        listing = lab_module("families.listing", WHAT)
        walk = lab_module("families.walk", WHAT)

    check_file("--json", as_json)
    check_file("--markdown", markdown)
    names, limits = listing.listed(only or None, kind or None), walk.Limits(seconds, gigabytes)
    found = []
    with counting(console, "audit families") as steps:
        steps.expect(len(names))
        place = str(pick_device(device))
        for one in walk.walk(names, limits, workers or processors(), place):
            found.append(one)
            steps.done(one.family)
            if one.failed:
                steps.say(f"{one.family} {one.verdict}: {one.reason}")
    try:
        if as_json is not None:
            _write(as_json, json.dumps(listing.as_dict(found), indent=1) + "\n")
        if markdown is not None:
            _write(markdown, listing.as_markdown(found))
    finally:
        Console().print(listing.as_table(found))
    if any(one.failed for one in found):
        raise typer.Exit(1)


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {str(file)!r} ({error}): name another file.") from error
