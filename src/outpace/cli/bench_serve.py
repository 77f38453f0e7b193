"""``outpace bench serve``: a running server under load."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outpace.cli.bench_flags import DataFolder, JsonFile
from outpace.cli.flags.grouped import grouped
from outpace.cli.printing import table
from outpace.cli.progress import counting
from outpace.cli.signals import sigterm_as_ctrl_c
from outpace.errors import ConfigError
from outpace.files import replacing

if TYPE_CHECKING:
    from outpace.bench.serving import Run, Server, Turns

THROUGHPUT = "tokens/s"
PngFile = Annotated[
    Path | None,
    typer.Option("--png", metavar="FILE", help="With --clients: plot throughput and TPOT."),
]


@dataclass(frozen=True, kw_only=True)
class AddressFlags:
    """The server, and when a request counts as served well."""

    url: Annotated[str, typer.Option(help="Address of a running `outpace serve`.")] = (
        "http://127.0.0.1:8000"
    )
    first_seconds: Annotated[
        float, typer.Option(help="Goodput counts requests whose TTFT is at most this,")
    ] = 1.0
    token_seconds: Annotated[float, typer.Option(help="and whose TPOT is at most this.")] = 0.1

    def server(self) -> Server:
        from outpace.bench.serving import Server
        from outpace.serve.settings import read_keys

        key = next(iter(read_keys(None)), None)
        return Server(self.url, self.first_seconds, self.token_seconds, key)


@dataclass(frozen=True, kw_only=True)
class AskedFlags:
    """What is asked for."""

    prompts: Annotated[
        str,
        typer.Option(
            help="A .jsonl or .json file, 'builtin', or a set in --data, as in bench run. Several "
            "with commas."
        ),
    ] = "builtin"
    data: DataFolder = None
    num_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests of each kind, each with a prompt of its own. Unset: as many as there "
            "are prompts.",
        ),
    ] = None
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per text.")] = 64
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    seed: Annotated[int, typer.Option(help="Seed of the arrivals and of sampled texts.")] = 0

    @property
    def options(self) -> dict[str, Any]:
        """What is the same in each request."""
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}

    def texts(self) -> list[str]:
        """Returns a prompt for each request; ``ConfigError`` for more requests than prompts: a
        look-up would draft the answer to a prompt that comes again from the first one."""
        from outpace.bench.prompts import chosen, read_sets

        known = read_sets(self.prompts, self.data)
        if self.num_requests is not None and self.num_requests > len(known):
            raise ConfigError(
                f"--prompts holds {len(known)} prompts, and each of {self.num_requests} requests "
                "needs one of its own, since look-ups and the prefix cache remember: give more "
                "prompts, or a smaller --num-requests."
            )
        return [prompt.text for prompt in chosen(known, self.num_requests)]


@grouped
@sigterm_as_ctrl_c()
def serve_benchmark(
    *,
    speculative: Annotated[
        str, typer.Option(help="What requests ask for, with commas: off, auto, or a number.")
    ] = "off,auto",
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second, which arrive at random (Poisson). Unset: 2."),
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Instead of a rate: N clients, each with one request open at any time.",
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(
            min=1, help="Runs of each setting, in turns. The report has medians and ratios by turn."
        ),
    ] = 1,
    address: AddressFlags,
    asked: AskedFlags,
    json_file: JsonFile = None,
    png: PngFile = None,
) -> None:
    """Measure a running server under load: latencies, throughput and goodput.

    Every kind of request gets the same prompts at the same times, or from as many clients. The
    server forgets the texts of each run before the next one: start it with --allow-forget. A key is
    read from OUTPACE_API_KEY.
    """
    from outpace.bench.outputs import check_distinct, check_file
    from outpace.bench.prompts import files_of

    check_distinct({"--json": json_file, "--png": png}, files_of(asked.prompts))
    check_file("--json", json_file)
    if clients is None:
        if png is not None:
            raise ConfigError("--png needs --clients: it shows what more of them change.")
        _by_rate(2.0 if rate is None else rate, speculative, repeats, address, asked, json_file)
    elif rate is not None:
        raise ConfigError("--rate and --clients exclude each other: drop one.")
    else:
        _by_clients(clients, speculative, repeats, address, asked, json_file, png)


def _by_rate(
    rate: float,
    speculative: str,
    repeats: int,
    address: AddressFlags,
    asked: AskedFlags,
    json_file: Path | None,
) -> None:
    from outpace.bench.serving import Load, run_load

    server = address.server()
    load = Load(asked.texts(), rate, **asked.options)
    found = _in_turns(speculative, repeats, server, partial(run_load, load, server))
    try:
        _write(json_file, found.figures)
    finally:
        _show(f"{address.url}, {rate:g} requests/s", found)
    _end(found)


def _by_clients(
    clients: str,
    speculative: str,
    repeats: int,
    address: AddressFlags,
    asked: AskedFlags,
    json_file: Path | None,
    png: Path | None,
) -> None:
    from outpace.bench.outputs import check_file
    from outpace.bench.plots import load_figure, require_matplotlib
    from outpace.bench.serving import Clients, run_clients
    from outpace.bench.session import numbers

    check_file("--png", png)
    if png is not None:
        require_matplotlib()
    server, texts = address.server(), asked.texts()
    turns: dict[str, dict[int, Sequence[Mapping[str, float]]]] = {}
    medians: dict[str, dict[int, Mapping[str, float]]] = {}
    loads = [Clients(texts, count, **asked.options) for count in numbers(clients, int, "--clients")]
    for load in loads:
        count = load.count
        found = _in_turns(speculative, repeats, server, partial(run_clients, load, server))
        for kind, one in found.medians().items():
            medians.setdefault(kind, {})[count] = one
            turns.setdefault(kind, {})[count] = found.figures[kind]
        try:
            _write(json_file, turns)  # after each, since the next may fail
            if png is not None:
                png.write_bytes(load_figure(medians))
        finally:
            _show(f"{address.url}, {count} clients", found)
        _end(found)


def _in_turns(speculative: str, repeats: int, server: Server, run: Callable[[str], Run]) -> Turns:
    """Returns the figures of each kind of request; all kinds take turns. What was measured before
    the server failed, or before Ctrl-C, is kept."""
    from outpace.bench.serving import Turns, summary

    kinds = [kind.strip() for kind in speculative.split(",")]
    if len({*kinds}) < len(kinds):
        raise ConfigError("--speculative names one kind of request twice: name each once.")
    server.forget()  # before any load is sent: a server that cannot is refused
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    notes: list[str] = []
    stopped: BaseException | None = None
    with counting(Console(stderr=True), "bench serve") as steps:
        steps.expect(len(kinds) * (1 + repeats))
        for kind in kinds:  # what the first requests pay for, such as buffers, is nobody's
            run(kind).check()
            steps.done("warming up")
        try:
            for turn in range(repeats):
                for kind in kinds if turn % 2 == 0 else reversed(kinds):
                    server.forget()
                    found = run(kind)
                    runs[kind].append(summary(found, server))
                    if found.problems:
                        notes.append(f"{kind}, run {turn + 1}: {found.sentence}")
                    steps.done(f"speculative={kind}, run {turn + 1} of {repeats}")
        except (ConfigError, KeyboardInterrupt) as error:
            if not any(runs.values()):
                raise
            stopped = error
    return Turns(runs, notes, stopped)


def _show(title: str, found: Turns) -> None:
    medians, console = found.medians(), Console()
    first, *others = medians
    rows = [[name, *(f"{one[name]:.4g}" for one in medians.values())] for name in medians[first]]
    if others:
        ratios = found.ratios(THROUGHPUT)
        rows.append([f"{THROUGHPUT} / {first}", "1.00", *(ratios[kind].phrase for kind in others)])
    console.print(table(title, ["", *medians], rows))
    for note in found.notes:
        console.print(note, highlight=False, markup=False)


def _end(found: Turns) -> None:
    """Raises what has stopped the turns, once what they have brought is written."""
    if found.stopped is not None:
        typer.echo("what was measured before it stopped is above and in the files", err=True)
        raise found.stopped


def _write(file: Path | None, found: Mapping[str, object]) -> None:
    if file is not None:
        with replacing(file) as part:
            part.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
