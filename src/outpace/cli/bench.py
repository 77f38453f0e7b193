"""``outpace bench``: synthetic pairs, paired runs, cost curves."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outpace.cli.bench_flags import (
    ContestFlags,
    CurveFlags,
    DraftFlags,
    PlanFlags,
    PromptSetFlags,
    ReportFlags,
    ShapeFlags,
)
from outpace.cli.bench_serve import serve_benchmark
from outpace.cli.flags.grouped import grouped
from outpace.cli.flags.groups import LlmFlags
from outpace.cli.loading import starting
from outpace.cli.printing import table
from outpace.cli.progress import Steps, counting, working
from outpace.cli.signals import sigterm_as_ctrl_c
from outpace.core.progress import silent
from outpace.errors import OutpaceError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure: interleaved paired runs, cost curves, synthetic pairs.",
)
pair_app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Synthetic pairs of any shape."
)
app.add_typer(pair_app, name="pair")


@pair_app.command("make")
@grouped
def pair_make(
    *,
    out: Annotated[Path, typer.Option(help="Folder to write target/ and drafter/ into.")],
    shape: Annotated[
        str, typer.Option(help="A named shape (bench-200m, llama-1b, qwen3-8b, ...) or 'custom'.")
    ] = "bench-200m",
    agreement: Annotated[float, typer.Option(help="Greedy agreement to reach.")] = 0.75,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the measured texts.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    sizes: ShapeFlags,
) -> None:
    """Write a random target and a drafter that agrees with it at a chosen rate."""
    with starting():
        from outpace.bench.model_shapes import shape_named
        from outpace.bench.outputs import check_folder
        from outpace.bench.session import quiet
        from outpace.bench.synthetic import PairOptions, check_free, describe, make_pair

    chosen = shape_named(shape, **vars(sizes))
    options = PairOptions(agreement=agreement, dtype=dtype, seed=seed, device=device)
    check_folder("--out", out)
    check_free(out)
    console = Console()
    with quiet(), working(Console(stderr=True), f"making a pair of shape {shape}"):
        pair = make_pair(chosen, options, out)
    shown = Table(title="Synthetic pair", show_header=False, title_justify="left")
    for name, value in describe(pair).items():
        shown.add_row(name, value)
    console.print(shown)


@app.command("run")
@grouped
@sigterm_as_ctrl_c()
def run_benchmark(
    *,
    model: LlmFlags,
    contest: ContestFlags,
    prompts: PromptSetFlags,
    pace: PlanFlags,
    output: ReportFlags,
) -> None:
    """Compare ways of decoding on the same prompts: interleaved, paired, with intervals.

    Ctrl-C or SIGTERM ends it with the results of the prompts that all methods have had.
    """
    with starting():
        from outpace.bench import session
        from outpace.bench.prompts import files_of
        from outpace.bench.session import quiet
        from outpace.bench.table import (
            by_task,
            left_out,
            narrow_by_method,
            notes,
            tasks_of,
            title,
        )

    plan = pace.plan()
    methods = contest.named(model.bundled)
    engines = session.Engines(
        model=model.model,
        configs=methods.configs,
        options=model.arguments(),
        vs=contest.peers,
        again=contest.again,
        left_out=methods.left_out,
        all_required=methods.all_required,
    )
    given = session.Given(prompts.taken(), prompts.chat)
    files = output.files(files_of(prompts.prompts))
    console = Console()
    with counting(Console(stderr=True), "bench run") as steps, quiet():
        say = steps.say if output.verbose else silent
        looking = session.Listener(lambda total: _ticker(steps, total), say)
        done = session.run(engines, plan, given, looking)
    try:  # before anything is shown: the reader of a pipe may have gone, as `head` does
        files.write(done)
    finally:
        for cell in done.report.cells:
            console.print(table(title(cell), *narrow_by_method(cell)))
            if len(tasks_of(cell)) > 1:
                console.print(table("speed-up by task", *by_task(cell)))
            for note in [*notes(cell), *left_out(done.report)]:
                console.print(note, highlight=False, markup=False)
    if done.error is not None:
        console.print("what was measured before the following error is above and in the files")
        raise done.error
    if done.stopped:
        raise KeyboardInterrupt


app.command("serve")(serve_benchmark)


@app.command("cost")
@grouped
def cost(*, model: LlmFlags, drafting: DraftFlags, curves: CurveFlags) -> None:
    """Measure what drafting and scoring cost, and what can be gained from that here."""
    with starting():
        from outpace.bench import session
        from outpace.bench.costs import cost_report, cost_rows
        from outpace.bench.outputs import OutputFiles
        from outpace.bench.session import quiet

    batches = session.numbers(curves.batch, int, "--batch")
    contexts = session.numbers(curves.context, int, "--context")
    engines = session.Engines(
        model=model.model,
        configs=drafting.for_costs().configs(model.bundled),
        options=model.arguments(),
    )
    files = OutputFiles(curves.json, curves.html, curves.png)
    files.check()
    console = Console()
    curves_before, all_curves = count(), len(batches) * len(contexts)
    with working(Console(stderr=True), "measuring") as report_step, quiet():
        report = cost_report(
            engines,
            batches,
            contexts,
            curves.temperature,
            curves.repeats,
            curves.longest,
            lambda what: report_step(what, next(curves_before) / all_curves),
        )
    try:
        files.write(report)
    finally:
        for curve in report.curves:
            heading, header, lines = cost_rows(curve)
            console.print(table(heading, header, lines))


def _ticker(steps: Steps, total: int) -> Callable[[str], None]:
    steps.expect(total)
    return steps.done


def run() -> None:
    """Runs the app by itself: ``python -m outpace.cli.bench``."""
    try:
        app()
    except OutpaceError as error:
        typer.echo(f"outpace: {error}", err=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    run()
