"""``outpace serve``: OpenAI's API, and a page that shows what was drafted."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from outpace.arguments import EngineArgs
from outpace.cli.flags.grouped import grouped
from outpace.cli.flags.groups import EngineFlags, SpeculationFlags
from outpace.cli.loading import load_llm
from outpace.cli.signals import sigterm_as_ctrl_c
from outpace.errors import ConfigError
from outpace.serve.settings import Settings, read_keys

SERVER = "Server"
LIMITS = "Limits"


def _option(flag: str, metavar: str, what: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=what, rich_help_panel=SERVER)


def _switch(flag: str, what: str, panel: str = SERVER) -> Any:
    return typer.Option(flag, help=what, rich_help_panel=panel)


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Where the server listens, and whom it lets in."""

    declared_in: ClassVar[type[Any]] = Settings
    panel: ClassVar[str] = SERVER

    host: str
    port: int
    served_model_name: Annotated[
        str | None, _option("--served-model-name", "NAME", "Name by which clients call the model.")
    ] = None
    api_key_file: Annotated[
        Path | None,
        _option(
            "--api-key-file",
            "FILE",
            "Let in only who shows one of these keys, one a line; also those of the environment "
            "variable OUTPACE_API_KEY.",
        ),
    ] = None
    allowed_origin: Annotated[
        list[str] | None,
        _option("--allowed-origin", "ORIGIN", "Let web pages of this origin call (CORS)."),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        _option(
            "--allowed-host",
            "NAME",
            "Answer to this Host header, as behind a proxy, and to no other but those named so.",
        ),
    ] = None
    no_playground: Annotated[bool, _switch("--no-playground", "Do not serve the page.")] = False
    log_prompts: bool
    allow_forget: bool
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Serve with N processes that share the requests, through Ray Serve.",
            rich_help_panel=SERVER,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LimitFlags:
    """How much one client may ask for."""

    declared_in: ClassVar[type[Any]] = Settings
    panel: ClassVar[str] = LIMITS

    max_waiting: int
    max_per_client: int | None
    max_body_bytes: int
    request_seconds: float
    drain_seconds: float


@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """Which texts are decoded together."""

    declared_in: ClassVar[type[Any]] = EngineArgs
    panel: ClassVar[str] = LIMITS

    max_num_seqs: int
    max_batch_total_tokens: int | None
    scheduling_policy: str
    no_prefix_caching: Annotated[
        bool,
        _switch(
            "--no-prefix-caching",
            "Read every prompt from its beginning, also the next turn of a chat.",
            LIMITS,
        ),
    ] = False

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ``LLM``."""
        return {
            "max_batch_total_tokens": self.max_batch_total_tokens,
            "scheduling_policy": self.scheduling_policy,
            "enable_prefix_caching": False if self.no_prefix_caching else "auto",
        }


@grouped
def serve(
    *,
    server: ServerFlags,
    limits: LimitFlags,
    batch: BatchFlags,
    engine: EngineFlags,
    speculation: SpeculationFlags,
) -> None:
    """Serve OpenAI's API, and a page at / that shows what was drafted.

    Examples:

    `outpace serve` (the bundled pair)

    `outpace serve -m big-model --draft small-model --port 8080`

    `outpace serve --verify coupled` (the same text with speculation and without, seed by seed)
    """
    check_installed("serve")
    arguments = {**engine.speculating(speculation), **batch.arguments()}
    settings = _settings(engine.model, server, limits)
    if server.replicas is not None:
        llm = {"model": engine.model, "max_num_seqs": batch.max_num_seqs, **arguments}
        _serve_replicas(server.replicas, settings, llm)
        return
    _run(engine.model, arguments, settings, batch.max_num_seqs)


def _settings(model: str | None, server: ServerFlags, limits: LimitFlags) -> Settings:
    return Settings(
        model_name=server.served_model_name or name_of(model),
        host=server.host,
        port=server.port,
        api_keys=read_keys(server.api_key_file),
        allowed_origins=tuple(server.allowed_origin or ()),
        allowed_hosts=tuple(server.allowed_host) if server.allowed_host else None,
        log_prompts=server.log_prompts,
        playground=not server.no_playground,
        allow_forget=server.allow_forget,
        **vars(limits),
    )


def name_of(model: str | None) -> str:
    """How clients call a model that the flags give no other name."""
    if model is None:
        return "outpace"
    name = Path(model).name
    return name if name not in ("", "..") else Path(model).resolve().name  # "." is a folder, too


def check_installed(verb: str) -> None:
    """Raises ``ConfigError`` where a package is missing that the server needs."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"outpace {verb} needs: pip install 'outpace[serve]'.") from error


def _run(model: str | None, engine: dict[str, Any], settings: Settings, rows: int) -> None:
    """Takes the port before the model is loaded, so that a port in use is refused at once, and
    whoever asks meanwhile has an answer."""
    from outpace.serve.listening import (
        Loading,
        answering,
        listen,
        log_to_stderr,
        make_runner,
        run_until_stopped,
    )

    listening, loading = listen(settings), Loading()
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    typer.echo(f"listening at {url}: status 503 until the model is loaded", err=True)
    log_to_stderr()
    with answering(listening, loading):
        llm, _ = load_llm(model, engine, {}, texts=rows, rows=rows, report=loading.report)
        runner = make_runner(llm, settings)

    typer.echo(f"outpace serves {settings.model_name} at {url}", err=True)
    if not settings.api_keys and settings.hosts == ("*",):
        typer.echo("anybody who reaches it may use it: give --api-key-file.", err=True)
    run_until_stopped(runner, listening)


@sigterm_as_ctrl_c()
def _serve_replicas(count: int, settings: Settings, llm: dict[str, Any]) -> None:
    """Serves through Ray until Ctrl-C or SIGTERM."""
    ray = with_ray("--replicas")
    from outpace.serve.listening import listen

    with listen(settings) as listening:  # a port in use is refused at once
        host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    with ray.served(count, host, port, llm, settings=vars(settings)):
        typer.echo(f"outpace serves {settings.model_name} at {url}, {count} times", err=True)
        threading.Event().wait()


def with_ray(flag: str) -> Any:
    """Returns `outpace.ray`; ``ConfigError`` where Ray is not installed."""
    try:
        import outpace.ray
    except ImportError as error:
        raise ConfigError(f"{flag}: {error}") from error
    return outpace.ray
