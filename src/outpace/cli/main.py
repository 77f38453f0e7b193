"""The ``outpace`` executable: finds the verb, and reports a user's mistakes in one sentence."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from outpace import __version__
from outpace.errors import OutpaceError, ProcessLost, did_you_mean

VERBS = {
    "generate": "outpace.cli.generate:generate",
    "chat": "outpace.cli.chat:chat",
    "methods": "outpace.cli.methods:methods",
    "inspect": "outpace.cli.inspect:inspect",
    "doctor": "outpace.cli.doctor:doctor",
    "bench": "outpace.cli.bench:app",
    "audit": "outpace.cli.audit:app",
    "train": "outpace.cli.train.train:train",
    "convert": "outpace.cli.convert:convert",
    "datastore": "outpace.cli.datastore:app",
    "tune": "outpace.cli.tune:app",
    "serve": "outpace.cli.serve:serve",
    "batch": "outpace.cli.batch:batch",
}
"""Where each verb lives: ``module:function``, or ``module:app`` for a Typer app with verbs of its
own. Imported when needed; a module imports torch only inside its functions."""

LOST = 3
"""The exit code where another process that holds a part of the model is gone."""

UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""What writing raises to an open file, which the error does not name: the disk is full, or a user's
share of it; the file is as large as one may be; the disk may not be written any more."""

EPILOG = "Without a model, every verb runs the small pair that comes with the package."


class Verbs(TyperGroup):
    """Verbs by name from `VERBS`; an `OutpaceError` of any of them ends in one sentence."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name, ctx) if cmd_name in VERBS else None

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in VERBS:
            ctx.fail(f"No such command {args[0]!r}{did_you_mean(args[0], VERBS)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OutpaceError as error:
            from outpace.cli.printing import for_command_line

            typer.echo(f"outpace: {for_command_line(str(error))}", err=True)
            raise typer.Exit(LOST if isinstance(error, ProcessLost) else 2) from error
        except OSError as error:
            # A disk that is full, a file that goes away: nothing that the library could foresee.
            if error.filename is not None:
                typer.echo(f"outpace: {error.strerror}: {str(error.filename)!r}.", err=True)
            elif error.errno in UNWRITTEN:
                typer.echo(f"outpace: the output cannot be written ({error.strerror}).", err=True)
                _discard_output()
            else:
                raise
            raise typer.Exit(2) from error


class Verb(TyperCommand):
    """A verb without verbs of its own. Of one that takes a prompt, words that are left over are
    most likely the rest of a text without quotes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = any(param.name == "prompt" for param in self.params)
        rest = super().parse_args(ctx, args)
        if ctx.args and not ctx.resilient_parsing:
            words = " ".join(ctx.args)
            ctx.fail(f"Unexpected {words!r}: put quotes around a text of several words.")
        return rest


def _discard_output() -> None:
    """Lets Python end without trying once more to write what could not be written."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _without_types(params: list[Any]) -> list[Any]:
    """Returns the options, flags without the type that Typer shows: "--json <bool>" reads as if a
    value had to follow, which would be taken for the prompt."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def _tidy(command: Any, parent: Any) -> None:
    """Takes the types off the flags of a command and of the commands below it."""
    context = command.context_class(command, parent=parent)
    _without_types(command.get_params(context))
    for inner in getattr(command, "commands", {}).values():
        _tidy(inner, context)


def _command(name: str, parent: Any) -> Any:
    module, _, attribute = VERBS[name].partition(":")
    verb = getattr(import_module(module), attribute)
    if not isinstance(verb, typer.Typer):
        function, verb = verb, typer.Typer(add_completion=False, rich_markup_mode="markdown")
        verb.command(name, cls=Verb)(function)
    command = typer.main.get_command(verb)
    command.name = name
    _tidy(command, parent)
    return command


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outpace {__version__}")
        typer.echo(f"CPU kernels: {_kernels()}")
        raise typer.Exit


def _kernels() -> str:
    if os.name != "posix":
        return "none, because they are made for Linux and macOS"
    from outpace.targets.cpu.library.compiler import kernels_found  # locks of POSIX

    return kernels_found()


app = typer.Typer(
    name="outpace",
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def outpace(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version, and which CPU kernels there are.",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Speculative decoding for Hugging Face models and GGUF files: faster text, the same words."""


def run() -> None:
    """Runs the command line and exits: 0, 2 for a user's mistake, 3 (`LOST`) where a process that
    holds a part of the model is gone, 4 where some lines of a batch failed, 130 after Ctrl-C."""
    # Python has no stream at all where the caller has closed one.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows "?", where Python would stop in mid-text.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app()


if __name__ == "__main__":
    run()
