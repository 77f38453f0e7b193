"""``outpace doctor``: what this machine can gain by speculation, and what to type."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outpace.cli.flags import options as opt
from outpace.cli.flags.grouped import grouped
from outpace.cli.flags.groups import ModelFlags
from outpace.cli.loading import starting
from outpace.cli.printing import say, table
from outpace.cli.progress import working

if TYPE_CHECKING:
    from outpace.bench.diagnosis import Diagnosis, DraftCost, DrafterResult, KindResult, PassCost
    from outpace.targets.describe import ComputedPart

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
        from outpace.bench.doctor import DoctorOptions, measure
        from outpace.bench.findings import findings
        from outpace.bench.session import quiet

    drafts, longest = tuple(dict.fromkeys(draft or ())), num_speculative_tokens
    options = {**model.arguments(), "max_model_len": max_model_len}
    with working(console, "measuring") as report, quiet():
        found = findings(
            measure(DoctorOptions(model.model, options, drafts, longest, max_tokens), report)
        )
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
        "--lora": model.lora,
        "--threads": model.threads,
    }
    words = [(flag, str(value)) for flag, value in given.items() if value is not None]
    trust = ["--trust-remote-code"] if model.trust_remote_code else []
    return [*chain.from_iterable(words), *trust]


BUSY = 0.5
"""Load for each processor from which the figures are said to be unsure."""


@dataclass(frozen=True)
class Advice:
    """What to type."""

    found: Diagnosis
    drafts: Sequence[str]
    """What was named with ``--draft``."""
    model: Sequence[str]
    """The flags of the model that were given; without ``-m`` the bundled pair is meant."""
    max_model_len: int | None = None

    @property
    def best(self) -> DrafterResult | None:
        """The model that is worth naming; None where none surely is."""
        found = self.found
        return next((each for each in found.drafters if each.name == found.best), None)

    @property
    def command(self) -> str:
        """The command that writes a text as it is fastest here."""
        words, best = ["outpace", "generate", *self.model], self.best
        if self.max_model_len is not None:
            words += ["--max-model-len", str(self.max_model_len)]
        if best is not None and best.model in self.drafts:
            words += ["--draft", str(best.model)]
        if best is None and self._bundled:  # whose own drafter would draft otherwise
            words += ["--method", "auto"]
        return shlex.join([*words, *self._chat, "your text"])

    @property
    def benchmark(self) -> str:
        """The command that measures whole texts."""
        words = ["outpace", "bench", "run", *self.model]
        if self.max_model_len is not None:
            words += ["--llm", json.dumps({"max_model_len": self.max_model_len})]
        look_ups, *models = self.found.drafters
        configs: list[dict[str, Any]] = [{"method": look_ups.method}]
        for each in models:
            named: dict[str, Any] = {"model": each.model} if each.model in self.drafts else {}
            configs.append({"method": each.method, **named})
        for config in configs:
            words += ["--speculative-config", json.dumps(config)]
        prompts = "chat,editing" if self.found.chat else "builtin"
        return shlex.join([*words, "--prompts", prompts, *self._chat, "--to-end", "--again"])

    @property
    def reason(self) -> str:
        """Why that is the command, in a sentence or two."""
        named, (look_ups, *models) = labels(self.found), self.found.drafters
        if self.best is not None:
            turns = "" if self._bundled else " With it named, auto drafts by it or by look-ups."
            return f"{named[self.best.name]} pays here.{turns}"
        helped = [kind.kind for kind in look_ups.kinds if kind.verdict == "gain"]
        first = (
            f"Look-ups pay on {' and '.join(helped)}."
            if helped
            else "Look-ups are not sure to pay, but cost next to nothing, and auto makes them "
            "only where they do."
        )
        return " ".join([first, *(f"{named[each.name]} is not sure to pay." for each in models)])

    @property
    def _bundled(self) -> bool:
        return "-m" not in self.model

    @property
    def _chat(self) -> list[str]:
        return ["--chat"] if self.found.chat else []


def show(found: Diagnosis, advice: Advice) -> None:
    """Prints a diagnosis and what to type."""
    out = Console(highlight=False, soft_wrap=True)
    say(out, *_machine_lines(found))
    parts = ["part", "kernels", "native code", "held as", "MB a pass"]
    out.print(table("What computes the model", parts, map(_part_row, found.parts)))
    costs = ["", "ms", "of a pass", "of memory bound", "roofline"]
    title = f"What passes and drafted tokens cost ({found.context} tokens cached)"
    out.print(table(title, costs, _cost_rows(found)))
    say(out, *_text_lines(found))
    named = labels(found)
    title = f"What drafts bring (texts of up to {found.max_tokens} tokens)"
    gains = ["", "times plain", "K", "tokens/pass", "accepted"]
    out.print(table(title, gains, _gain_rows(found)))
    for drafter in found.drafters:
        say(out, *(f"{named[drafter.name]}, {each.kind}: {each.why}." for each in drafter.kinds))
    others = [each for each in found.drafters if each.elsewhere]
    if others:
        title = "What they would bring elsewhere: predicted, not measured"
        out.print(table(title, ["", *(named[each.name] for each in others)], _other_rows(others)))
    say(out, "", advice.reason, "What to type:", f"    {advice.command}")
    say(out, "To be surer, measure whole texts:", f"    {advice.benchmark}")


def labels(found: Diagnosis) -> dict[str, str]:
    """Returns a short label for each drafter by its name: its method, with a number where several
    have that. A file's name may be longer than a table is wide."""
    methods = [each.method for each in found.drafters[1:]]
    known = {found.drafters[0].name: "look-ups"}
    for number, each in enumerate(found.drafters[1:], 1):
        several = methods.count(each.method) > 1
        known[each.name] = f"{each.method} ({number})" if several else each.method
    return known


def _machine_lines(found: Diagnosis) -> Iterator[str]:
    machine = found.machine
    yield f"model: {found.model}"
    named = labels(found)
    for each in found.drafters:
        yield f"{named[each.name]}: {each.described or each.name}"
    features = f" with {', '.join(machine.features)}" if machine.features else ""
    level = f"; kernels for {machine.level}" if machine.level else ""
    gpu = "" if machine.gpu == "none" else f"; {machine.gpu}"
    yield f"processor: {machine.processor}, {machine.instructions}{features}{level}{gpu}"
    yield (
        f"threads: {machine.threads}, of {_counted(machine.processors, 'processor')} that may be "
        "used"
    )
    if (load := machine.load_of_each) is not None and load >= BUSY:
        yield (
            f"THE MACHINE IS BUSY (load {machine.load}): the figures are unsure, measure again in "
            "a quiet minute."
        )
    yield f"memory: {machine.bandwidth / 1e9:.1f} GB/s"
    if machine.multiply_adds is not None:
        yield (
            f"arithmetic: {machine.multiply_adds / 1e9:.0f} G multiply-adds a second and thread, "
            f"in passes over {found.passes[-1].columns} tokens"
        )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s'[: count != 1]}"


def _part_row(part: ComputedPart) -> list[str]:
    name = part.name if part.count == 1 else f"{part.name} ({part.count})"
    native = f"{part.native_code} of {part.count}" if part.native_code else ""
    return [name, part.kernels, native, part.held, f"{part.nbytes / 1e6:.0f}"]


def _cost_rows(found: Diagnosis) -> Iterator[list[str]]:
    named = labels(found)
    for each in found.passes:
        yield [_pass_name(each), *_cells(each.seconds, each.over_one, each.of_memory_bound),
               "" if each.roofline is None else f"{each.roofline:.2f}"]  # fmt: skip
    for drafter in found.drafters:
        for cost in drafter.costs:
            bound = cost.of_memory_bound
            yield [
                _draft_name(named[drafter.name], cost),
                *_cells(cost.seconds, cost.of_a_pass, bound),
                "",
            ]


def _pass_name(each: PassCost) -> str:
    return f"a pass over {_counted(each.columns, 'token')}"


def _draft_name(drafter: str, cost: DraftCost) -> str:
    each = "one drafted token" if cost.tokens == 1 else f"each of {cost.tokens} drafted"
    return f"{drafter}: {each}"


def _cells(seconds: float, of_a_pass: float, bound: float | None) -> list[str]:
    share = "" if bound is None else f"{bound:.0%}"
    return [f"{1000 * seconds:.2f}", f"{of_a_pass:.2f}", share]


def _text_lines(found: Diagnosis) -> Iterator[str]:
    named = labels(found)
    yield f"plain decoding: {1 / found.plain_seconds:.1f} tokens/s, without reading the prompt"
    for drafter in found.drafters:
        if drafter.reading_seconds is not None:
            yield (
                f"{named[drafter.name]} reads a prompt in {drafter.reading_seconds:.2f} s before "
                "its first draft, which is not counted below"
            )


def _gain_rows(found: Diagnosis) -> Iterator[list[str]]:
    named = labels(found)
    for drafter in found.drafters:
        label = named[drafter.name]
        yield from (_gain_row(label, kind) for kind in drafter.kinds)
        gains = any(kind.verdict != "no gain" for kind in drafter.kinds)
        yield [f"{label}, all", str(drafter.speedup) if gains else "no gain", "", "", ""]


def _other_rows(drafters: Sequence[DrafterResult]) -> Iterator[list[str]]:
    for machine in drafters[0].elsewhere:
        yield [machine, *(f"{each.elsewhere[machine]:.2f}" for each in drafters)]


def _gain_row(drafter: str, kind: KindResult) -> list[str]:
    gains = kind.verdict != "no gain"
    return [
        f"{drafter}, {kind.kind}",
        str(kind.speedup) if gains else "no gain",
        str(kind.length) if gains else "",
        f"{kind.tokens_per_pass:.2f}",
        f"{kind.acceptance:.2f}" if kind.with_draft else "",
    ]
