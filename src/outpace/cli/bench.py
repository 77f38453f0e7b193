"""``outpace bench``: synthetic pairs, paired runs, cost curves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from outpace.cli.loading import starting
from outpace.cli.options import (
    Device,
    Draft,
    Dtype,
    Method,
    Model,
    NumSpeculativeTokens,
    Quantize,
    Threads,
    TrustRemoteCode,
    Verify,
)
from outpace.errors import OutpaceError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure: interleaved paired runs, cost curves, synthetic pairs.",
)
pair_app = typer.Typer(no_args_is_help=True, help="Synthetic pairs of any shape.")
app.add_typer(pair_app, name="pair")

Configs = Annotated[
    list[str] | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help="How to speculate, as in Python. May be given several times, to compare.",
    ),
]
EngineOptions = Annotated[
    str | None,
    typer.Option("--llm", metavar="JSON", help="Other arguments of LLM, such as max_model_len."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write JSON.")]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained page.")
]
PngFolder = Annotated[
    Path | None, typer.Option("--png", metavar="DIR", help="Write the figures as PNG.")
]


@pair_app.command("make")
def pair_make(
    out: Annotated[Path, typer.Option(help="Folder to write target/ and drafter/ into.")],
    shape: Annotated[
        str, typer.Option(help="A named shape (bench-200m, llama-1b, qwen3-8b, ...) or 'custom'.")
    ] = "bench-200m",
    agreement: Annotated[float, typer.Option(help="Greedy agreement to reach.")] = 0.75,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the weights and of the texts measured on.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    layers: Annotated[int | None, typer.Option(help="Layers of the target.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Width.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of the MLP.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Tokens.")] = None,
    draft_layers: Annotated[
        int | None, typer.Option(help="How many of the target's first layers are the drafter.")
    ] = None,
    family: Annotated[str | None, typer.Option(help="llama, qwen2 or qwen3.")] = None,
) -> None:
    """Write a random target and a drafter that agrees with it at a chosen rate."""
    with starting():
        from outpace.bench.library import quiet
        from outpace.bench.model_shapes import shape_named
        from outpace.bench.outputs import check_folder
        from outpace.bench.pair import PairOptions, describe, make_pair

    chosen = shape_named(
        shape,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        vocab=vocab,
        draft_layers=draft_layers,
        family=family,
    )
    options = PairOptions(agreement=agreement, dtype=dtype, seed=seed, device=device)
    check_folder("--out", out)
    console = Console()
    with quiet(), console.status(f"making a pair of shape {shape}"):
        pair = make_pair(chosen, options, out)
    table = Table(title="Synthetic pair", show_header=False, title_justify="left")
    for name, value in describe(pair).items():
        table.add_row(name, value)
    console.print(table)


@app.command("run")
def run_benchmark(
    model: Model = None,
    config: Configs = None,
    draft: Draft = None,
    method: Method = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    verify: Verify = None,
    vs: Annotated[
        str,
        typer.Option(help="Peers, with commas: plain, hf, hf-assisted, openvino."),
    ] = "plain",
    again: Annotated[
        bool, typer.Option("--again", help="Run plain decoding twice: an A/A check.")
    ] = False,
    prompts: Annotated[
        str,
        typer.Option(
            help="A .jsonl file, 'builtin', or a set in --data: specbench, humaneval, gsm8k, mbpp, "
            "mt_bench, fairytaleqa, oasst, selfinstruct, indomain, dialogue."
        ),
    ] = "builtin",
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where named sets are. Unset: OUTPACE_DATA.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Take this many, evenly from all tasks.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1",
    temperature: Annotated[str, typer.Option(help="Temperatures, with commas.")] = "0",
    max_tokens: Annotated[int, typer.Option(help="New tokens per text, for every method.")] = 128,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Keep the last so many tokens of a prompt.")
    ] = 512,
    repeats: Annotated[int, typer.Option(help="Runs of each prompt.")] = 1,
    warmup: Annotated[int, typer.Option(help="Untimed runs before.")] = 1,
    sweep: Annotated[
        str, typer.Option(help="Also run these draft lengths, with commas, for the curve.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of sampled texts.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    quantization: Quantize = None,
    trust_remote_code: TrustRemoteCode = False,
    threads: Threads = None,
    llm: EngineOptions = None,
    json: JsonFile = None,
    html: HtmlFile = None,
    png: PngFolder = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the tables as Markdown.")
    ] = None,
    spec_bench: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the answers in Spec-Bench's format."),
    ] = None,
) -> None:
    """Compare ways of decoding on the same prompts: interleaved, paired, with intervals."""
    with starting():
        from outpace.bench import session
        from outpace.bench.benchmark import BenchmarkPlan
        from outpace.bench.library import quiet
        from outpace.bench.outputs import OutputFiles
        from outpace.bench.prompts import chosen, read_prompts
        from outpace.bench.schedule import Pace
        from outpace.bench.table import NARROW, narrow_rows, notes, title

    plan = BenchmarkPlan(
        batches=session.numbers(batch, int, "--batch"),
        temperatures=session.numbers(temperature, float, "--temperature"),
        max_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        pace=Pace(repeats, warmup),
        seed=seed,
        sweep=session.numbers(sweep, int, "--sweep"),
    )
    engines = session.Engines(
        model=model,
        configs=_configs(config, draft, method, num_speculative_tokens, verify, model is None),
        options=_options(dtype, device, quantization, trust_remote_code, threads, llm),
        vs=tuple(name.strip() for name in vs.split(",") if name.strip()),
        again=again,
    )
    taken = chosen(read_prompts(prompts, data), num_prompts)
    files = OutputFiles(json, html, png, markdown, spec_bench)
    files.check()
    console = Console()
    with _bar(console) as bar, quiet():
        done = session.run(engines, plan, taken, lambda total: _ticker(bar, total))
    for cell in done.report.cells:
        console.print(_table(title(cell), NARROW, narrow_rows(cell)))
        for note in notes(cell):
            console.print(note, highlight=False, markup=False)
    files.write(done)


@app.command("serve")
def serve_benchmark(
    url: Annotated[
        str, typer.Option(help="Address of a running `outpace serve`.")
    ] = "http://127.0.0.1:8000",
    speculative: Annotated[
        str, typer.Option(help="What requests ask for, with commas: off, auto, or a number.")
    ] = "off,auto",
    rate: Annotated[
        float, typer.Option(help="Requests per second, which arrive at random (Poisson).")
    ] = 2.0,
    prompts: Annotated[
        str, typer.Option(help="A .jsonl file, 'builtin', or a set in --data, as in bench run.")
    ] = "builtin",
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where named sets are. Unset: OUTPACE_DATA.")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of each kind.")] = 40,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per text.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    first_seconds: Annotated[
        float, typer.Option(help="Goodput counts texts whose first token came as soon as this,")
    ] = 1.0,
    token_seconds: Annotated[
        float, typer.Option(help="and whose other tokens took at most this, on average.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure a running server under load: latencies, throughput and goodput.

    Every kind of request gets the same prompts at the same times. A key is read from
    OUTPACE_API_KEY.
    """
    from outpace.bench.prompts import read_prompts
    from outpace.bench.serving import Load, Target, run_load, summary

    texts = [prompt.text for prompt in read_prompts(prompts, data)]
    chosen = [texts[index % len(texts)] for index in range(num_requests)]
    load = Load(chosen, rate, max_tokens, temperature, seed)
    target = Target(url, first_seconds, token_seconds)
    found = {}
    for kind in speculative.split(","):
        with Console(stderr=True).status(f"speculative={kind}: {num_requests} requests"):
            found[kind] = summary(run_load(load, target, kind), target)
    header = ["", *found]
    rows = [[name, *(f"{one[name]:.4g}" for one in found.values())] for name in found[kind]]
    Console().print(_table(f"{url}, {rate:g} requests/s", header, rows))
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n")


@app.command("cost")
def cost(
    model: Model = None,
    config: Configs = None,
    draft: Draft = None,
    method: Method = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1,4,16",
    context: Annotated[str, typer.Option(help="Cached tokens per row, with commas.")] = "128,1024",
    temperature: Annotated[float, typer.Option(help="Of the draft.")] = 0.0,
    longest: Annotated[int, typer.Option(help="Longest draft.")] = 16,
    repeats: Annotated[int, typer.Option(help="Samples of each; the median counts.")] = 7,
    dtype: Dtype = "auto",
    device: Device = "auto",
    quantization: Quantize = None,
    trust_remote_code: TrustRemoteCode = False,
    threads: Threads = None,
    llm: EngineOptions = None,
    json: JsonFile = None,
    html: HtmlFile = None,
    png: PngFolder = None,
) -> None:
    """Measure what drafting and scoring cost, and what can be gained from that here."""
    with starting():
        from outpace.bench import session
        from outpace.bench.costing import cost_report, cost_rows
        from outpace.bench.library import quiet
        from outpace.bench.outputs import OutputFiles

    batches = session.numbers(batch, int, "--batch")
    contexts = session.numbers(context, int, "--context")
    engines = session.Engines(
        model=model,
        configs=_configs(config, draft, method, None, None, model is None),
        options=_options(dtype, device, quantization, trust_remote_code, threads, llm),
    )
    files = OutputFiles(json, html, png)
    files.check()
    console = Console()
    with console.status("measuring") as status, quiet():
        report = cost_report(
            engines, batches, contexts, temperature, repeats, longest, status.update
        )
    for curve in report.curves:
        heading, header, lines = cost_rows(curve)
        console.print(_table(heading, header, lines))
    files.write_cost(report)


def _configs(
    configs: list[str] | None,
    draft: str | None,
    method: str | None,
    count: str | None,
    verify: str | None,
    bundled: bool,
) -> tuple[dict[str, Any], ...]:
    from outpace.bench.session import parse_config
    from outpace.cli.speculation import speculation

    if configs:
        speculation(configs[0], draft, method, count, verify, bundled)  # refuses both together
        return tuple(parse_config(text) for text in configs)
    found = speculation(None, draft, method, count, verify, bundled)
    return () if found is None else (found,)


def _options(
    dtype: str,
    device: str,
    quantization: str | None,
    trust_remote_code: bool,
    threads: int | None,
    llm: str | None,
) -> dict[str, Any]:
    """The arguments of `LLM` but for the model and how to speculate."""
    from outpace.bench.session import parse_config

    named: dict[str, Any] = {"dtype": dtype, "device": device, "quantization": quantization}
    if trust_remote_code:
        named["trust_remote_code"] = True
    if threads is not None:
        named["threads"] = threads
    return {**named, **parse_config(llm or "{}")}


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # Drawing is work too: rarely enough that no run notices.
        refresh_per_second=1,
    )


def _ticker(bar: Progress, total: int) -> Callable[[str], None]:
    task = bar.add_task("starting", total=total)
    return lambda what: bar.update(task, advance=1, description=what)


def _table(title: str, header: Any, rows: Any) -> Table:
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, justify="left" if name == header[0] else "right")
    for row in rows:
        table.add_row(*row)
    return table


def run() -> None:
    """Runs the app by itself: ``python -m outpace.cli.bench``."""
    try:
        app()
    except OutpaceError as error:
        typer.echo(f"outpace: {error}", err=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    run()
