"""The groups of flags of ``outpace bench``, each with what the benchmark is given for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.flags import options as opt
from outpace.cli.flags.speculation import parse_object, speculation
from outpace.errors import ConfigError

if TYPE_CHECKING:
    from outpace.bench.contest import BenchmarkPlan
    from outpace.bench.outputs import OutputFiles
    from outpace.bench.prompts import Prompt
    from outpace.bench.session import NamedMethods

DataFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where named sets are. Unset: OUTPACE_DATA.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write JSON.")]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained page.")
]
PngFolder = Annotated[
    Path | None, typer.Option("--png", metavar="DIR", help="Write the figures as PNG.")
]


@dataclass(frozen=True, kw_only=True)
class DraftFlags:
    """How to speculate, in one way or in several that are compared."""

    config: Annotated[
        list[str] | None,
        typer.Option(
            "--speculative-config",
            metavar="JSON",
            help="How to speculate, as in Python. bench run takes several, to compare.",
        ),
    ] = None
    draft: opt.Draft = None
    method: opt.Method = None

    def for_costs(self) -> DraftFlags:
        """Returns the flags with a draft model drafting alone where no method is named: what the
        default would ask besides has costs of its own."""
        alone = self.draft is not None and self.method is None
        return replace(self, method="draft_model") if alone else self

    def configs(
        self, bundled: bool, count: str | None = None, verify: str | None = None
    ) -> tuple[dict[str, Any], ...]:
        """Returns one ``speculative_config`` for each contestant."""
        if self.config:  # both together are refused
            speculation(self.config[0], self.draft, self.method, count, verify, bundled)
            return self._listed()
        found = speculation(None, self.draft, self.method, count, verify, bundled)
        return () if found is None else (found,)

    def _listed(self) -> tuple[dict[str, Any], ...]:
        """Returns what each ``--speculative-config`` says."""
        given = self.config or []
        return tuple(parse_object("--speculative-config", each, ConfigError) for each in given)


@dataclass(frozen=True, kw_only=True)
class ContestFlags(DraftFlags):
    """Who takes part."""

    num_speculative_tokens: opt.NumSpeculativeTokens = None
    verify: opt.Verify = None
    vs: Annotated[
        str,
        typer.Option(
            help="Peers, with commas: plain, hf, hf-assisted, openvino, llamacpp and ik_llamacpp "
            "(GGUF files), or one way of theirs: hf-assisted-default, llamacpp-plain, "
            "openvino-speculative-3."
        ),
    ] = "plain"
    again: Annotated[
        bool, typer.Option("--again", help="Run plain decoding twice: an A/A check.")
    ] = False

    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Several ways to draft, with commas, or 'all': a row for each, after those of "
            "--speculative-config. --draft is the model of those that run one.",
        ),
    ] = None

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of the other programs."""
        return tuple(name.strip() for name in self.vs.split(",") if name.strip())

    def named(self, bundled: bool) -> NamedMethods:
        """Returns one ``speculative_config`` for each contestant, and who was left out."""
        from outpace.bench.session import NamedMethods, named_methods
        from outpace.llm import BUNDLED

        if self.methods is None:
            found = self.configs(bundled, self.num_speculative_tokens, self.verify)
            return NamedMethods(found, {})
        if self.method:
            raise ConfigError(
                "--methods and --method exclude each other: name that one in --methods, too."
            )
        model = self.draft or (str(BUNDLED / "drafter") if bundled else None)
        shared = speculation(None, model, None, self.num_speculative_tokens, self.verify, bundled)
        names = [name.strip() for name in self.methods.split(",") if name.strip()]
        named = named_methods(names, shared or {}, BUNDLED if bundled else None)
        return replace(named, configs=(*self._listed(), *named.configs))


@dataclass(frozen=True, kw_only=True)
class PromptSetFlags:
    """Which prompts are run, and how they are given to the model."""

    prompts: Annotated[
        str,
        typer.Option(
            help="A .jsonl or .json file, 'builtin', 'chat' (questions for instruct models), "
            "'editing' (changes in given code), or a set in --data: specbench, humaneval, gsm8k, "
            "mbpp, mt_bench, fairytaleqa, oasst, selfinstruct, indomain, dialogue. Several with "
            "commas."
        ),
    ] = "builtin"
    data: DataFolder = None
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Take this many, evenly from all tasks.")
    ] = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Prompts are a user's messages: give them through the model's chat template, as "
            "instruct models expect them.",
        ),
    ] = False

    def taken(self) -> list[Prompt]:
        """Returns the prompts that are run."""
        from outpace.bench.prompts import chosen, read_sets

        return chosen(read_sets(self.prompts, self.data), self.num_prompts)


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """What is run, and how often."""

    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1"
    temperature: Annotated[str, typer.Option(help="Temperatures, with commas.")] = "0"
    max_tokens: Annotated[int, typer.Option(help="New tokens per text, for every method.")] = 128
    to_end: Annotated[
        bool,
        typer.Option(
            "--to-end",
            help="Let a text end where the target ends it, if that is before --max-tokens; all "
            "methods write as many tokens.",
        ),
    ] = False
    samples: Annotated[
        int,
        typer.Option(
            help="Texts of each prompt, written side by side in a batch; at temperatures above 0."
        ),
    ] = 1
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Keep only the last N tokens of a prompt.")
    ] = 512
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each prompt.")] = 1
    warmup: Annotated[int, typer.Option(min=0, help="Untimed runs before the timed ones.")] = 1
    sweep: Annotated[
        str, typer.Option(help="Also run these draft lengths, with commas, for the curve.")
    ] = ""
    seed: Annotated[int, typer.Option(help="Seed of sampled texts.")] = 0

    def plan(self) -> BenchmarkPlan:
        """Returns the plan; ``ConfigError`` for values that cannot be run."""
        from outpace.bench.contest import BenchmarkPlan, Pace
        from outpace.bench.session import numbers

        return BenchmarkPlan(
            batches=numbers(self.batch, int, "--batch"),
            temperatures=numbers(self.temperature, float, "--temperature"),
            max_tokens=self.max_tokens,
            to_end=self.to_end,
            samples=self.samples,
            max_prompt_tokens=self.max_prompt_tokens,
            pace=Pace(self.repeats, self.warmup),
            seed=self.seed,
            sweep=numbers(self.sweep, int, "--sweep") if self.sweep else (),
        )


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """What is written."""

    json: JsonFile = None
    html: HtmlFile = None
    png: PngFolder = None
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the tables as Markdown.")
    ] = None
    spec_bench: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the answers in Spec-Bench's format."),
    ] = None
    verbose: opt.Verbose = False

    def files(self, read: Iterable[Path] = ()) -> OutputFiles:
        """Returns the files; raises at once where one cannot be written, or is one of those that
        are read."""
        from outpace.bench.outputs import OutputFiles

        found = OutputFiles(self.json, self.html, self.png, self.markdown, self.spec_bench)
        found.check(read)
        return found


@dataclass(frozen=True, kw_only=True)
class CurveFlags:
    """Where the cost curves are measured, and what is written."""

    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1,4,16"
    context: Annotated[str, typer.Option(help="Cached tokens per row, with commas.")] = "128,512"
    temperature: Annotated[float, typer.Option(help="Temperature of the draft.")] = 0.0
    longest: Annotated[int, typer.Option(help="Tokens of the longest draft.")] = 16
    repeats: Annotated[int, typer.Option(help="Timings of each cost; their median counts.")] = 7
    json: JsonFile = None
    html: HtmlFile = None
    png: PngFolder = None


@dataclass(frozen=True, kw_only=True)
class ShapeFlags:
    """Sizes that differ from the named shape's."""

    layers: Annotated[int | None, typer.Option(help="Layers of the target.")] = None
    hidden: Annotated[int | None, typer.Option(help="Width.")] = None
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads.")] = None
    intermediate: Annotated[int | None, typer.Option(help="Width of the MLP.")] = None
    vocab: Annotated[int | None, typer.Option(help="Tokens.")] = None
    draft_layers: Annotated[
        int | None, typer.Option(help="How many of the target's first layers are the drafter.")
    ] = None
    family: Annotated[str | None, typer.Option(help="llama, qwen2 or qwen3.")] = None
