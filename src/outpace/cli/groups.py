"""The groups of flags that verbs share, each with what the library is given for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outpace.cli import options as opt
from outpace.cli.speculation import logit_bias, speculation


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
        found: dict[str, Any] = {
            "dtype": self.dtype,
            "device": self.device,
            "quantization": self.quantization,
            "trust_remote_code": self.trust_remote_code,
        }
        return found if self.threads is None else {**found, "threads": self.threads}


@dataclass(frozen=True, kw_only=True)
class EngineFlags(ModelFlags):
    """The model's flags, and those of an engine that is used as it is."""

    max_model_len: opt.MaxModelLen = None
    generation_config: opt.GenerationConfig = "auto"
    compile_passes: opt.Compile = False

    def arguments(self) -> dict[str, Any]:
        return {
            **super().arguments(),
            "max_model_len": self.max_model_len,
            "generation_config": self.generation_config,
            "compile": self.compile_passes,
        }


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
        return speculation(
            self.speculative_config,
            self.draft,
            self.method,
            self.num_speculative_tokens,
            self.verify,
            bundled,
        )


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen."""

    temperature: opt.Temperature = None
    top_p: opt.TopP = None
    top_k: opt.TopK = None
    min_p: opt.MinP = None
    typical_p: opt.TypicalP = None
    repetition_penalty: opt.RepetitionPenalty = None
    presence_penalty: opt.PresencePenalty = 0.0
    frequency_penalty: opt.FrequencyPenalty = 0.0
    logit_bias_json: opt.LogitBias = None
    seed: opt.Seed = None

    def params(self) -> dict[str, Any]:
        """Returns the options of ``SamplingParams``."""
        found = {**vars(self), "logit_bias": logit_bias(self.logit_bias_json)}
        del found["logit_bias_json"]
        return found


@dataclass(frozen=True, kw_only=True)
class StoppingFlags:
    """Where a text ends."""

    max_tokens: opt.MaxTokens = None
    min_tokens: opt.MinTokens = None
    stop: opt.Stop = None
    stop_token_id: opt.StopTokenId = None
    ignore_eos: opt.IgnoreEos = False

    def params(self) -> dict[str, Any]:
        """Returns the options of ``SamplingParams``."""
        return {
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "stop": self.stop or None,
            "stop_token_ids": self.stop_token_id or (),
            "ignore_eos": self.ignore_eos,
        }
