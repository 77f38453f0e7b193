"""The groups of flags that verbs share, each with what the library is given for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from outpace.arguments import EngineArgs
from outpace.cli.flags import options as opt
from outpace.cli.flags.grouped import Flags, flag_name
from outpace.cli.flags.speculation import parse_object, speculation
from outpace.core.beam_params import BeamSearchParams
from outpace.core.options import options_of
from outpace.core.params import SamplingParams
from outpace.errors import ConfigError, ParamsError


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Which model, and how it is held and computed."""

    declared_in: ClassVar[type[Any]] = EngineArgs
    panel: ClassVar[str] = opt.MODEL

    model: str | None
    dtype: str
    device: str
    quantization: str | None
    lora: str | None
    trust_remote_code: bool
    threads: int | None

    @property
    def bundled(self) -> bool:
        """Whether no model was named, so that the bundled pair is meant."""
        return self.model is None

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ``LLM``, but for the model itself."""
        known = {one.name for one in options_of(EngineArgs)} - {"model"}
        return {name: value for name, value in vars(self).items() if name in known}


@dataclass(frozen=True, kw_only=True)
class SplitFlags(ModelFlags):
    """The model's flags, and over how many devices or processes it is laid out."""

    device_map: dict[str, Any] | str | None
    tensor_parallel_size: int

    def __post_init__(self) -> None:
        """Does not return in a process that torchrun has started to follow the first one: that one
        alone reads prompts, listens at ports and writes."""
        if self.tensor_parallel_size > 1 and "RANK" in os.environ:
            from outpace.targets.parallel.follower import follow_unless_first

            follow_unless_first(self.tensor_parallel_size)


@dataclass(frozen=True, kw_only=True)
class LlmFlags(SplitFlags):
    """The model's flags, and any other argument of ``LLM``."""

    llm: Annotated[
        str | None,
        typer.Option("--llm", metavar="JSON", help="Other arguments of LLM, as max_model_len."),
    ] = None

    @property
    def others(self) -> dict[str, Any]:
        """The arguments of ``LLM`` in ``--llm``."""
        return parse_object("--llm", self.llm or "{}", ConfigError)

    def arguments(self) -> dict[str, Any]:
        own, others = super().arguments(), self.others
        for name in own.keys() & others.keys():
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"--llm sets {name}, which has a flag of its own: give {flag}.")
        return {**own, **others}


@dataclass(frozen=True, kw_only=True)
class EngineFlags(SplitFlags):
    """The model's flags, and those of an engine that is used as it is."""

    max_model_len: int | None
    generation_config: str
    compile: bool | str
    kv_cache_dtype: str
    batch_invariant: bool

    def speculating(self, speculation: SpeculationFlags) -> dict[str, Any]:
        """Returns the same arguments, and how to speculate."""
        return {"speculative_config": speculation.config(self.bundled), **self.arguments()}


@dataclass(frozen=True, kw_only=True)
class SpeculationFlags:
    """How to speculate."""

    draft: opt.Draft = None
    method: opt.Method = None
    num_speculative_tokens: opt.NumSpeculativeTokens = None
    verify: opt.Verify = None
    speculative_config: opt.SpeculativeJson = None

    def config(self, bundled: bool) -> dict[str, Any] | None:
        """Returns the ``speculative_config``; None if the flags say nothing."""
        return speculation(**vars(self), bundled=bundled)


BEAMS = ("beam_width", "length_penalty", "early_stopping")
"""The options of `BeamSearchParams` that say how to search."""

Beams = Annotated[
    dict[str, Any], Flags(BeamSearchParams, BEAMS, opt.BEAMS, defaults={"beam_width": None})
]
"""How the most likely texts are searched for; without a beam_width they are not."""


def check_search(beams: Mapping[str, Any], compare: bool, config: Mapping[str, Any] | None) -> None:
    """Raises the error of flags that make no sense with a beam search, or without one."""
    if beams["beam_width"] is None:
        for name, value in beams.items():
            if value is not None:
                raise ParamsError(
                    f"{flag_name(name)} needs --num-beams, which asks for a beam search."
                )
        return
    if compare:
        raise ParamsError(
            "--compare measures speculation, and beams are decoded plainly: drop it or --num-beams."
        )
    if config is not None and config.get("method") != "none":
        raise ConfigError(
            "--num-beams does not go with a drafter: a beam search draws nothing, so that no rule "
            "can verify drafts against a distribution; drop what asks for one, or --num-beams."
        )


SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
"""The options of `SamplingParams` that say how tokens are chosen."""

Sampling = Annotated[
    dict[str, Any],
    Flags(SamplingParams, (*SAMPLING, "structured_outputs", "seed"), opt.SAMPLING),
]
"""How tokens are chosen."""

STOPPING = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
"""The options of `SamplingParams` that say where a text ends."""

Stopping = Annotated[dict[str, Any], Flags(SamplingParams, STOPPING, opt.STOPPING)]
"""Where a text ends."""
