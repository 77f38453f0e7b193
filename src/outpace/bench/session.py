"""From the options of the command line to contestants and a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from outpace.arguments import bundled_drafter, speculation
from outpace.bench.benchmark import Benchmark, SettingFailed
from outpace.bench.contest import BASELINE, BenchmarkPlan, Contestant, OutpaceContestant, Tick
from outpace.bench.peers.registry import Models, check_peers, peers
from outpace.bench.prompts import Prompt
from outpace.bench.provenance import provenance
from outpace.bench.results import Report
from outpace.bench.roofline import read_bandwidth
from outpace.bench.setting import MeasuredSetting
from outpace.config import SpeculativeConfig
from outpace.core.progress import silent
from outpace.draft.registry import drafter_names, find_drafter
from outpace.errors import ConfigError, OutpaceError, PromptError, did_you_mean
from outpace.heads.checkpoint import find_head_kind
from outpace.inputs import chats
from outpace.llm import BUNDLED, LLM
from outpace.methods.models.options import DraftModelOptions
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.loading.source import locate, names_gguf

ALL = "all"
"""Stands for every drafter that can be built from what is given."""

PLAIN = "none"
"""The name of plain decoding, which always takes part."""


@dataclass(frozen=True)
class NamedMethods:
    """One ``speculative_config`` for each method, and why others were left out."""

    configs: tuple[Mapping[str, Any], ...]
    left_out: Mapping[str, str]
    all_required: bool = True
    """Whether each was asked for by its name, so that none may be left out."""


def named_methods(
    names: Sequence[str], shared: Mapping[str, Any], bundled: Path | None = None
) -> NamedMethods:
    """Returns the configurations of the methods with these names.

    shared: what every configuration says besides its method; 'model', a draft model, goes to those
    that run one. bundled: where the bundled models are, for the bundled target, which brings heads
    for some methods. Of "all", methods that need more than that are left out, with the reason.
    Raises ``ConfigError`` for an unknown method, and for a method by name that needs more.

    >>> named_methods(["ngram"], {"model": "a/draft/model"}).configs
    ({'method': 'ngram'},)
    """
    if list(names) != [ALL]:
        found = tuple(_config(name, shared, bundled) for name in names)
        for config in found:
            _try(config)
        return NamedMethods(found, {})
    configs, left_out = [], {}
    for name in drafter_names():
        if name == PLAIN:
            continue
        config = _config(name, shared, bundled)
        try:
            _try(config)
        except ConfigError as error:
            left_out[name] = str(error).rstrip(".")
        else:
            configs.append(config)
    return NamedMethods(tuple(configs), left_out, all_required=False)


def _config(name: str, shared: Mapping[str, Any], bundled: Path | None) -> dict[str, Any]:
    """What is shared, without the draft model where the method runs none, but with the head that
    comes with the bundled target."""
    runs_one = issubclass(find_drafter(name).Options, DraftModelOptions)
    kept = {key: value for key, value in shared.items() if key != "model" or runs_one}
    head = None if bundled is None else bundled_drafter(name, bundled)
    brought = {} if head is None else {"model": str(head)}
    return {"method": name, **brought, **kept}


def _try(config: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` where the method's own options lack something."""
    given = {key: config[key] for key in ("model",) if key in config}
    find_drafter(config["method"]).configure(given)


# -- who takes part, and the run ---------------------------------------------------------------


@dataclass(frozen=True)
class Engines:
    """Which models, how to speculate with them, and what else takes part."""

    model: str | LoadedModel | None
    """A path, a hub name, what was loaded already, or None for the bundled pair."""
    configs: tuple[Mapping[str, Any], ...]
    """One or several ``speculative_config``; each becomes a contestant."""
    options: Mapping[str, Any]
    """Other arguments of `LLM`."""
    vs: tuple[str, ...] = ()
    """Names of other programs that take part."""
    again: bool = False
    """Whether plain decoding runs a second time under another name: its speed-up must be 1.00."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Methods that do not take part, and why."""
    all_required: bool = True
    """Whether a configuration that the model refuses ends the run; else it is left out."""


@dataclass(frozen=True)
class Lineup:
    """Who takes part, and why others do not."""

    contestants: list[Contestant]
    left_out: Mapping[str, str]


def lineup(engines: Engines, rows: int) -> Lineup:
    """Returns plain decoding first, then one per configuration, then the other programs.

    rows: the greatest batch size that will be run.
    """
    _check_comparable(engines.options, rows)
    wanted = [name for name in dict.fromkeys(engines.vs) if name != BASELINE]
    check_peers(wanted)
    # Without a drafter, which would read along and draft from the baseline's texts.
    plain = engine(engines, {"method": "none"}, rows)
    llms, left_out = _speculating(engines, plain, rows)
    found: list[Contestant] = [OutpaceContestant(plain, BASELINE, "off")]
    if engines.again:
        found.append(OutpaceContestant(plain, "plain again", "off"))
    found += map(OutpaceContestant, llms, _labels(llms))
    if wanted:
        found += peers(wanted, _models(engines, llms[0] if llms else plain))
    return Lineup(found, {**engines.left_out, **left_out})


def _speculating(engines: Engines, plain: LLM, rows: int) -> tuple[list[LLM], dict[str, str]]:
    """Returns an engine for each configuration, and why some have none if not all are required."""
    bundled = BUNDLED if engines.model is None else None
    llms, left_out = [], {}
    for given in engines.configs or (None,):
        config = speculation(given, bundled)
        if config.method == "none":
            continue
        try:
            llm = _with_target_of(plain, engines, config, rows)
            llm.forget_texts()  # refused now where it cannot be done between runs
        except OutpaceError as error:
            if engines.all_required:
                raise
            left_out[config.method] = str(error).rstrip(".")
        else:
            llms.append(llm)
    return llms, left_out


def _labels(llms: Sequence[LLM]) -> list[str]:
    """A name for each: as much of its configuration as the others do not have, else a number."""
    if len(llms) == 1:
        return [llms[0].config.method]
    short = [
        f"{llm.config.method} K={llm.config.num_speculative_tokens} {llm.engine.verifier.rule.name}"
        for llm in llms
    ]
    long = [
        label if short.count(label) == 1 else " ".join([label, *_options_of(llm)])
        for llm, label in zip(llms, short, strict=True)
    ]
    return [
        label if long.count(label) == 1 else f"{label} ({number})"
        for number, label in enumerate(long, 1)
    ]


def _options_of(llm: LLM) -> list[str]:
    """The drafter's options that were given, or the name of its model's folder."""
    given = {name: value for name, value in llm.config.options.items() if name != "model"}
    model = llm.config.options.get("model")
    named = {"model": Path(model).name} if isinstance(model, str) and not given else {}
    return [f"{name}={value}" for name, value in {**named, **given}.items()]


def engine(
    engines: Engines, config: Mapping[str, Any] | SpeculativeConfig | None, rows: int
) -> LLM:
    """Returns the engine of one ``speculative_config``, for n rows."""
    check_arguments(engines.options, WITH_FLAGS)
    options = {"generation_config": "none", "max_num_seqs": rows, **engines.options}
    return LLM(engines.model, speculative_config=config, **options)


def check_arguments(options: Mapping[str, Any], with_flags: Mapping[str, str]) -> None:
    """Raises ``ConfigError`` for an argument that `LLM` does not have, that another flag gives, or
    that no JSON can hold. with_flags: the arguments that have flags, and these."""
    known = set(signature(LLM).parameters) - {*with_flags, "progress"}
    for name in options:
        if name in with_flags:
            raise ConfigError(f"--llm must not say {name!r}: give {with_flags[name]}.")
        if name not in known:
            raise ConfigError(f"--llm cannot give LLM {name!r}{did_you_mean(name, known)}.")


def _check_comparable(options: Mapping[str, Any], rows: int) -> None:
    """Raises ``ConfigError`` for arguments of `LLM` under which the times of runs would mislead."""
    if options.get("enable_prefix_caching"):
        raise ConfigError(
            "a benchmark gives each prompt several times, and enable_prefix_caching would read it "
            "in the first run only: leave it out of --llm."
        )
    most = options.get("max_num_seqs", rows)
    if isinstance(most, int) and most < rows:
        raise ConfigError(
            f"--batch asks for {rows} texts at once, and max_num_seqs in --llm allows {most}: "
            "raise it or leave it out."
        )


WITH_FLAGS = {"model": "--model", "speculative_config": "--speculative-config"}
"""Arguments of `LLM` that have flags of their own."""

OF_LOADING = (
    "dtype",
    "device",
    "device_map",
    "quantization",
    "lora",
    "trust_remote_code",
    "cpu_kernels",
    "progress",
    "tensor_parallel_size",
)
"""Arguments of `LLM` that say how a model is loaded."""


def _with_target_of(first: LLM, engines: Engines, config: SpeculativeConfig, rows: int) -> LLM:
    """Returns the engine of another configuration over the same target: its weights are in memory
    once, however many engines there are."""
    options = {k: v for k, v in engines.options.items() if k not in OF_LOADING}
    return engine(replace(engines, model=first.target, options=options), config, rows)


def _models(engines: Engines, llm: LLM) -> Models:
    drafter = llm.config.options.get("model")
    head = find_head_kind(drafter) is not None
    return Models(
        target=_file(llm.target.name),
        drafter=None if drafter is None or head else _file(str(drafter)),
        head=str(drafter) if head else None,
        dtype=str(llm.target.dtype).removeprefix("torch."),
        device=str(llm.target.device),
        quantization=engines.options.get("quantization"),
        drafter_quantization=llm.config.options.get("quantization"),
        adapted=any(each.get("lora") for each in (engines.options, llm.config.options)),
    )


def _file(model: str) -> str:
    """The GGUF file that a name stands for, which may be one of a hub's file or of a folder with
    nothing else: other programs read the file itself. Other names as they are."""
    return locate(model) if names_gguf(model) else model


@dataclass(frozen=True)
class Finished:
    """A report, the runs that it was made from, and the tokenizer of their texts."""

    report: Report
    settings: Sequence[MeasuredSetting]
    tokenizer: Any
    stopped: bool = False
    """Whether Ctrl-C came before all was run."""
    error: BaseException | None = None
    """Why a setting could not be measured; those before it are here."""


@dataclass(frozen=True)
class Given:
    """The prompts, and how the models are given them."""

    prompts: Sequence[Prompt]
    chat: bool = False
    """Whether they are a user's messages, given through the target's chat template."""

    def encoder(self, llm: LLM) -> Callable[[str], list[int]]:
        """Returns what makes token ids of a prompt; ``PromptError`` where the model has none."""
        if llm.tokenizer is None:
            raise PromptError(f"{llm.target.name} came without a tokenizer, which prompts need.")
        if not self.chat:
            return lambda text: list(llm.tokenizer(text).input_ids)
        loaded = llm.target
        chats.check_template(loaded.tokenizer, loaded.name, "leave --chat out", loaded.processor)
        return lambda text: llm.chat_ids([{"role": "user", "content": text}])


@dataclass(frozen=True)
class Listener:
    """Who hears about a run while it goes on."""

    progress: Callable[[int], Tick] = lambda total: silent
    """Is given the number of steps at most, and returns what to call after each."""
    say: Callable[[str], None] = silent
    """Is given a line about each engine: how its models are computed, and what is slow and why."""


def run(
    engines: Engines, plan: BenchmarkPlan, given: Given, listener: Listener | None = None
) -> Finished:
    """Runs a whole benchmark, or what there was until Ctrl-C (`Finished.stopped`) or an error
    (`Finished.error`)."""
    listener = listener or Listener()
    facts = provenance()  # before the run, so that the load recorded is not the benchmark's own
    taking_part = lineup(engines, max(plan.batches))
    competing = taking_part.contestants
    llm = next(c.llm for c in competing if isinstance(c, OutpaceContestant))
    for name, known in _engines_of(competing).items():
        listener.say(f"{name}: {known.describe()}")
    benchmark = Benchmark(
        plan=plan,
        prompts=given.prompts,
        encode=given.encoder(llm),
        whole=given.chat,
        contestants=competing,
        bandwidth=read_bandwidth(llm.target.device),
    )
    error: BaseException | None = None
    try:
        measured = replace(benchmark, tick=listener.progress(benchmark.ticks())).run()
    except SettingFailed as failed:
        measured, error = failed.found, failed.__cause__
    facts |= {
        "model": Path(llm.target.name).name,
        "dtype": str(llm.target.dtype).removeprefix("torch."),
        "quantization": llm.target.quantization or "none",
        "threads": str(torch.get_num_threads()),  # as the models were loaded with
        "chat template": "applied" if given.chat else "none",
        "repeats": str(plan.pace.repeats),
        "warmup": str(plan.pace.warmup),
        "seed": str(plan.seed),
    }
    if taking_part.left_out:
        facts["left out"] = _by_reason(taking_part.left_out)
    results = tuple(setting.result for setting in measured)
    report = Report(facts, BASELINE, benchmark.bandwidth, results)
    report.check()
    last = results[-1]
    left_out = len(results) < len(plan.settings) and error is None
    stopped = left_out or last.stopped_of is not None
    return Finished(report, measured, llm.tokenizer, stopped, error)


def _by_reason(left_out: Mapping[str, str]) -> str:
    """Returns the names with their reasons, each reason once.

    >>> _by_reason({"medusa": "it needs a head", "eagle": "it needs a head", "pass": "no states"})
    'medusa, eagle (it needs a head); pass (no states)'
    """
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(each)} ({reason})" for reason, each in names.items())


def _engines_of(competing: Sequence[Contestant]) -> dict[str, LLM]:
    """Our own engines, each once, under the name of the last contestant that uses it."""
    named = {id(c.llm): (c.name, c.llm) for c in competing if isinstance(c, OutpaceContestant)}
    return dict(named.values())


def numbers(text: str, kind: type, flag: str) -> tuple[Any, ...]:
    """Returns the numbers of a comma-separated list; ``ConfigError`` for anything else, and for a
    list without any.

    >>> numbers("1,4,16", int, "--batch")
    (1, 4, 16)
    """
    try:
        found = tuple(kind(part) for part in text.split(",") if part.strip())
        if not found:
            raise ValueError("no number")
        return found
    except ValueError as error:
        raise ConfigError(
            f"{flag} must be numbers with commas between them, not {text!r}."
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers for a while: it would draw its own progress bars into ours."""
    logging = import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
