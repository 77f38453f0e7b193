"""``outpace serve``: OpenAI's API, and a page that shows what was drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outpace.cli import options as opt
from outpace.cli.loading import load_llm
from outpace.cli.speculation import speculation
from outpace.errors import ConfigError

SERVER = "Server"
LIMITS = "Limits"


def _option(flag: str, metavar: str, what: str, panel: str = SERVER) -> Any:
    return typer.Option(flag, metavar=metavar, help=what, rich_help_panel=panel)


def serve(
    model: opt.Model = None,
    host: Annotated[str, _option("--host", "HOST", "Listen here; 0.0.0.0: to all.")] = "127.0.0.1",
    port: Annotated[int, _option("--port", "N", "Listen at this port; 0: any free one.")] = 8000,
    served_model_name: Annotated[
        str | None, _option("--served-model-name", "NAME", "As clients call the model.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _option(
            "--api-key-file",
            "FILE",
            "Let in only who shows one of these keys, one a line; also those of the environment "
            "variable OUTPACE_API_KEY.",
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        _option("--allowed-origin", "ORIGIN", "Let web pages of this origin call (CORS)."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        _option("--allowed-host", "NAME", "Answer to this Host header, as behind a proxy."),
    ] = None,
    no_playground: Annotated[
        bool,
        typer.Option("--no-playground", help="Do not serve the page.", rich_help_panel=SERVER),
    ] = False,
    log_prompts: Annotated[
        bool,
        typer.Option(
            "--log-prompts", help="Write prompts and texts into the log.", rich_help_panel=SERVER
        ),
    ] = False,
    max_num_seqs: Annotated[
        int, _option("--max-num-seqs", "N", "Texts decoded at once.", LIMITS)
    ] = 16,
    max_waiting: Annotated[
        int, _option("--max-waiting", "N", "Texts that may wait; more get status 429.", LIMITS)
    ] = 256,
    max_body_bytes: Annotated[
        int, _option("--max-body-bytes", "N", "Largest body of a request.", LIMITS)
    ] = 4 << 20,
    request_seconds: Annotated[
        float, _option("--request-seconds", "S", "Longest time of a request.", LIMITS)
    ] = 600.0,
    drain_seconds: Annotated[
        float,
        _option("--drain-seconds", "S", "Time of open requests after SIGTERM.", LIMITS),
    ] = 30.0,
    scheduling_policy: Annotated[
        str,
        _option(
            "--scheduling-policy",
            "NAME",
            "Who waits least: fcfs (who came first) or priority (the smallest number that a "
            "request gives).",
            LIMITS,
        ),
    ] = "fcfs",
    no_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--no-prefix-caching",
            help="Read every prompt from its beginning, also the next turn of a chat.",
            rich_help_panel=LIMITS,
        ),
    ] = False,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    quantization: opt.Quantize = None,
    max_model_len: opt.MaxModelLen = None,
    generation_config: opt.GenerationConfig = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    threads: opt.Threads = None,
    compile_passes: opt.Compile = False,
    draft: opt.Draft = None,
    method: opt.Method = None,
    num_speculative_tokens: opt.NumSpeculativeTokens = None,
    verify: opt.Verify = None,
    speculative_config: opt.SpeculativeJson = None,
) -> None:
    """Serve OpenAI's API, and a page at / that shows what was drafted.

    Examples:

    `outpace serve` (the bundled pair)

    `outpace serve -m big-model --draft small-model --port 8080`

    `outpace serve --verify coupled` (the same text with speculation and without, seed by seed)
    """
    _check_installed()
    config = speculation(
        speculative_config, draft, method, num_speculative_tokens, verify, bundled=model is None
    )
    engine: dict[str, Any] = {
        "speculative_config": config,
        "dtype": dtype,
        "device": device,
        "quantization": quantization,
        "max_model_len": max_model_len,
        "generation_config": generation_config,
        "trust_remote_code": trust_remote_code,
        "compile": compile_passes,
        "scheduling_policy": scheduling_policy,
        "enable_prefix_caching": not no_prefix_caching,
        **({} if threads is None else {"threads": threads}),
    }
    from outpace.serve.settings import Settings, read_keys

    settings = Settings(
        model_name=served_model_name or (Path(model).name if model else "outpace"),
        host=host,
        port=port,
        api_keys=read_keys(api_key_file),
        allowed_origins=tuple(allowed_origin or ()),
        allowed_hosts=tuple(allowed_host) if allowed_host else None,
        max_waiting=max_waiting,
        max_body_bytes=max_body_bytes,
        request_seconds=request_seconds,
        drain_seconds=drain_seconds,
        log_prompts=log_prompts,
        playground=not no_playground,
    )
    _run(model, engine, settings, max_num_seqs)


def _check_installed() -> None:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError("outpace serve needs: pip install 'outpace[serve]'.") from error


def _run(model: str | None, engine: dict[str, Any], settings: Any, rows: int) -> None:
    """Takes the port before the model is loaded, so that a port in use is told at once."""
    from outpace.serve.runner import listen, serve

    listening = listen(settings)
    llm, _ = load_llm(model, engine, {}, texts=rows, rows=rows)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"outpace serves {settings.model_name} at http://{shown}:{port}", err=True)
    if not settings.api_keys and settings.hosts == ("*",):
        typer.echo("anybody who reaches it may use it: give --api-key-file.", err=True)
    serve(llm, settings, listening)
