"""The groups of flags that verbs share, each with what the library is given for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from outpace.cli.flags import options as opt
from outpace.cli.flags.declared import Flags
from outpace.cli.flags.names import DTYPES
from outpace.cli.flags.speculation import parse_object, speculation
from outpace.core.params import SamplingParams
from outpace.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Which model, and how it is held and computed."""

    model: opt.Model = None
    dtype: opt.Dtype = "auto"
    device: opt.Device = "auto"
    quantization: opt.Quantize = None
    trust_remote_code: opt.TrustRemoteCode = False
    threads: opt.Threads = None

    @property
    def bundled(self) -> bool:
        """Whether no model was named, so that the bundled pair is meant."""
        return self.model is None

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ``LLM``, but for the model itself."""
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(
                f"unknown dtype {self.dtype!r}: choose from auto, {', '.join(DTYPES)}."
            )
        names = ["dtype", "device", "quantization", "trust_remote_code"]
        return _named(self, names if self.threads is None else [*names, "threads"])


@dataclass(frozen=True, kw_only=True)
class LlmFlags(ModelFlags):
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
        return {**super().arguments(), **self.others}


@dataclass(frozen=True, kw_only=True)
class EngineFlags(ModelFlags):
    """The model's flags, and those of an engine that is used as it is."""

    max_model_len: opt.MaxModelLen = None
    generation_config: opt.GenerationConfig = "auto"
    compile_passes: opt.Compile = None
    batch_invariant: opt.BatchInvariant = False

    def arguments(self) -> dict[str, Any]:
        return {
            **super().arguments(),
            **_named(self, ["max_model_len", "generation_config", "batch_invariant"]),
            "compile": "auto" if self.compile_passes is None else self.compile_passes,
        }

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


WHEN: Mapping[str, Any] = {"true": True, "false": False, "never": "never"}
"""The words of ``--early-stopping``."""


@dataclass(frozen=True, kw_only=True)
class BeamFlags:
    """Whether the most likely texts are searched for, and how."""

    num_beams: opt.NumBeams = None
    length_penalty: opt.LengthPenalty = None
    early_stopping: opt.EarlyStopping = None

    @property
    def given(self) -> list[str]:
        """The flags that were given."""
        return [
            f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None
        ]

    def params(self) -> dict[str, Any]:
        """Returns the options of ``BeamSearchParams``."""
        return {
            "beam_width": self.num_beams,
            "length_penalty": self.length_penalty,
            "early_stopping": WHEN.get(self.early_stopping or ""),
        }


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

Sampling = Annotated[dict[str, Any], Flags(SamplingParams, (*SAMPLING, "seed"), opt.SAMPLING)]
"""How tokens are chosen."""

STOPPING = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
"""The options of `SamplingParams` that say where a text ends."""

Stopping = Annotated[dict[str, Any], Flags(SamplingParams, STOPPING, opt.STOPPING)]
"""Where a text ends."""


def _named(flags: Any, names: Sequence[str]) -> dict[str, Any]:
    """Returns the flags that have the same names as the library's arguments."""
    return {name: getattr(flags, name) for name in names}
