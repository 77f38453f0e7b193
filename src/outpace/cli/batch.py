"""``outpace batch``: answers a file of requests."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console

from outpace.cli.flags.grouped import grouped
from outpace.cli.flags.groups import EngineFlags, SpeculationFlags
from outpace.cli.loading import load_llm
from outpace.cli.printing import say
from outpace.cli.progress import counting, working
from outpace.cli.serve import BatchFlags, check_installed, name_of, with_ray
from outpace.cli.signals import handled_by, sigterm_as_ctrl_c
from outpace.errors import ConfigError
from outpace.serve.settings import Settings

if TYPE_CHECKING:
    from outpace.serve.batch_files import Answers, Requests

FILES = "Files"
SOME_FAILED = 4
"""The exit code where all lines were answered, some of them with an error."""


@dataclass(frozen=True, kw_only=True)
class LineFlags:
    """What lines hold."""

    declared_in: ClassVar[type[Any]] = Settings
    panel: ClassVar[str] = FILES

    served_model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name by which lines call the model.", rich_help_panel=FILES
        ),
    ] = None
    max_body_bytes: int
    ray: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Answer in N processes, through Ray Data.",
            rich_help_panel=FILES,
        ),
    ] = None


@grouped
@sigterm_as_ctrl_c()
def batch(
    *,
    requests: Annotated[Path, typer.Argument(metavar="IN", help="Requests, one a line.")],
    answers: Annotated[Path, typer.Argument(metavar="OUT", help="Where their answers go.")],
    lines: LineFlags,
    batched: BatchFlags,
    engine: EngineFlags,
    speculation: SpeculationFlags,
) -> None:
    """Answer a file of requests in OpenAI's batch format, as `outpace serve` would answer them.

    Lines are answered in the order that is fastest; the custom_id says which is which. The same
    command goes on where an earlier one was stopped or killed. The exit code is 4 where lines were
    answered with an error.

    Example: `outpace batch requests.jsonl answers.jsonl -m big-model --draft small-model`
    """
    check_installed("batch")
    from outpace.serve.batch_files import Answers, Requests, run
    from outpace.serve.in_process import InProcess

    ray = with_ray("--ray") if lines.ray else None
    console = Console(stderr=True)
    served: dict[str, Any] = {
        "model_name": lines.served_model_name or name_of(engine.model),
        "max_body_bytes": lines.max_body_bytes,
    }
    arguments = {**engine.speculating(speculation), **batched.arguments()}
    with working(console, f"reading {requests}"):
        found = Requests(requests, lines.max_body_bytes)
    if answers.exists() and answers.samefile(requests):
        raise ConfigError("the answers would be written over the requests: name another file.")
    with Answers(answers, found, served["model_name"]) as written:
        if written.count:
            say(console, f"{answers} holds {written.count} of {found.total} answers")
        if ray and found.left:
            llm = {"model": engine.model, "max_num_seqs": batched.max_num_seqs, **arguments}
            with _shown(console, found, written) as report:
                ray.run_batch(found, written, lines.ray, report, llm, **served)
        elif found.left:
            rows = batched.max_num_seqs
            server = InProcess(load_llm(engine.model, arguments, {}, rows, rows=rows)[0], **served)
            # A shell's background job begins with Ctrl-C ignored, and asyncio then has no way to
            # stop between two steps, which SIGTERM needs, too. So Ctrl-C stops such a job as well.
            awake = handled_by(signal.default_int_handler)
            with _shown(console, found, written) as report, awake:
                asyncio.run(run(server, found, written, report))
    if written.failed:
        reason = f"the first: {written.first_failure}"
        typer.echo(f"outpace: {written.failed} of {found.total} lines failed ({reason})", err=True)
        raise typer.Exit(SOME_FAILED)


@contextmanager
def _shown(console: Console, requests: Requests, answers: Answers) -> Iterator[Callable[[], None]]:
    """Shows how far it is, and at the end how fast it was. What is yielded is called after each
    line."""
    begin = perf_counter()

    def speed() -> str:
        return f"{answers.tokens / (perf_counter() - begin):.1f} tokens/s"

    with counting(console, "batch") as steps:
        steps.expect(requests.total, answers.count)
        try:
            yield lambda: steps.at(answers.count, speed())
        except KeyboardInterrupt:
            steps.say("stopped: the same command goes on from here")
            raise
    say(console, f"{answers.tokens} tokens in {perf_counter() - begin:.1f} s ({speed()})")
