"""Synthetic models: shapes by name, random weights that generate varied text, and a factor on what
the later layers add."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from outpace.errors import ConfigError, did_you_mean

FAMILIES = ("llama", "qwen2", "qwen3")
SMALLEST_VOCABULARY = 258
"""256 bytes, one special token, one word."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A target's shape, and how many of its layers make the drafter.

    The drafter is a part of the target: it has the same width, embedding, norm and head.
    """

    family: str = "llama"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    draft_layers: int = 1
    tied: bool = False
    head_dim: int | None = None
    context: int = 4096

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(
                f"unknown family {self.family!r}{did_you_mean(self.family, FAMILIES)}."
            )
        for name in ("layers", "hidden", "heads", "kv_heads", "intermediate", "draft_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.vocab < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"vocab must be at least {SMALLEST_VOCABULARY} (all bytes), not {self.vocab}."
            )
        if self.draft_layers >= self.layers:
            raise ConfigError(
                f"draft_layers must be less than the {self.layers} layers, not {self.draft_layers}."
            )
        if self.heads % self.kv_heads or (self.head_dim is None and self.hidden % self.heads):
            raise ConfigError(
                f"{self.heads} heads must divide the width {self.hidden} and be a multiple of the "
                f"{self.kv_heads} kv_heads."
            )

    def config(self, layers: int) -> Any:
        """Returns the transformers configuration of a model with this many layers."""
        cls = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[self.family]
        return getattr(transformers, cls)(
            num_hidden_layers=layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim or self.hidden // self.heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocab,
            tie_word_embeddings=self.tied,
            max_position_embeddings=self.context,
            # No end token, so that every program generates texts of the full length.
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=256,
        )


def shapes() -> dict[str, ModelShape]:
    """Returns the named shapes. Widths and depths are those of the models they are named after."""
    return {
        "tiny": ModelShape(
            layers=4, hidden=64, heads=4, kv_heads=2, intermediate=128, vocab=512, tied=True
        ),
        "bench-200m": ModelShape(
            layers=16, hidden=1024, heads=16, kv_heads=8, intermediate=2816, vocab=16384, tied=True
        ),
        "llama-160m": ModelShape(
            layers=12, hidden=768, heads=12, kv_heads=12, intermediate=3072, vocab=32000
        ),
        "tinyllama-1b": ModelShape(
            layers=22, hidden=2048, heads=32, kv_heads=4, intermediate=5632, vocab=32000
        ),
        "llama-1b": ModelShape(
            layers=16, hidden=2048, heads=32, kv_heads=8, intermediate=8192, vocab=128256, tied=True
        ),
        "llama-7b": ModelShape(
            layers=32, hidden=4096, heads=32, kv_heads=32, intermediate=11008, vocab=32000
        ),
        "llama-8b": ModelShape(
            layers=32, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocab=128256
        ),
        "qwen2.5-0.5b": ModelShape(
            family="qwen2", layers=24, hidden=896, heads=14, kv_heads=2, intermediate=4864,
            vocab=151936, tied=True,
        ),
        "qwen2.5-7b": ModelShape(
            family="qwen2", layers=28, hidden=3584, heads=28, kv_heads=4, intermediate=18944,
            vocab=152064,
        ),
        "qwen3-0.6b": ModelShape(
            family="qwen3", layers=28, hidden=1024, heads=16, kv_heads=8, intermediate=3072,
            vocab=151936, tied=True, head_dim=128,
        ),
        "qwen3-8b": ModelShape(
            family="qwen3", layers=36, hidden=4096, heads=32, kv_heads=8, intermediate=12288,
            vocab=151936, head_dim=128,
        ),
    }  # fmt: skip


def shape_named(name: str, **changes: Any) -> ModelShape:
    """Returns a named shape with some of its numbers changed; "custom" starts from nothing.

    >>> shape_named("tiny", layers=6).layers
    6
    """
    changes = {key: value for key, value in changes.items() if value is not None}
    if name == "custom":
        needed = ("layers", "hidden", "heads", "intermediate", "vocab")
        missing = [key for key in needed if key not in changes]
        if missing:
            raise ConfigError(f"shape 'custom' needs {', '.join(missing)} too.")
        changes.setdefault("kv_heads", changes["heads"])
        return ModelShape(**changes)
    known = shapes()
    if name not in known:
        raise ConfigError(f"unknown shape {name!r}{did_you_mean(name, [*known, 'custom'])}.")
    return dataclasses.replace(known[name], **changes)


# -- weights -----------------------------------------------------------------------------------


_EMBEDDING = 0.02
_ATTENTION = 2.0
"""Gain of query and key. With 1 attention is nearly an average, which changes little from token to
token, and texts begin to cycle; with 2 the next token depends on which token stood where."""
_MLP = 2.0


def random_model(shape: ModelShape, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """Returns the target before calibration. The weights are a function of shape, seed, dtype and
    the kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    auto: Any = transformers.AutoModelForCausalLM
    with _untouched_generators(), device:
        model = auto.from_config(shape.config(shape.layers), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, generator)
        _sharpen(model, shape, generator)
    return model.eval()


def _fill(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if "norm" in name:
        parameter.fill_(1.0)
    elif name.endswith("bias"):
        parameter.zero_()
    elif "embed" in name or "lm_head" in name:
        parameter.normal_(0, _EMBEDDING, generator=generator)
    else:
        peaked = "q_proj" in name or "k_proj" in name
        gain = _ATTENTION if peaked else _MLP if "down_proj" in name else 1.0
        # Scaled by the number of inputs, so that each layer adds about as much as it is given and
        # the last token's embedding alone never decides the next token.
        parameter.normal_(0, gain / math.sqrt(parameter.shape[1]), generator=generator)


def _sharpen(model: nn.Module, shape: ModelShape, generator: torch.Generator) -> None:
    """Sets the final norm so that the distribution is about as uncertain as a language model's.

    Of Gaussian logits over V tokens the largest dominates once their standard deviation is above
    sqrt(2 ln V). Random signs keep a head that is tied to the embedding from preferring the last
    token or the one before it.
    """
    weight: Any = model.model.norm.weight  # type: ignore[union-attr]
    deviation = math.sqrt(2 * math.log(shape.vocab))
    signs = torch.randint(0, 2, weight.shape, generator=generator, device=weight.device) * 2 - 1
    weight.copy_(signs * deviation / (_EMBEDDING * math.sqrt(shape.hidden)))


def first_layers(model: Any, shape: ModelShape) -> Any:
    """Returns the drafter: the model's first layers with its norm and head, sharing tensors."""
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        drafter = auto.from_config(shape.config(shape.draft_layers), dtype=model.dtype)
    own = dict(model.state_dict())
    drafter.load_state_dict({name: own[name] for name in drafter.state_dict()}, assign=True)
    drafter.tie_weights()
    # The table of rotary angles is not among the weights that were just loaded.
    drafter.model.rotary_emb = model.model.rotary_emb
    return drafter.eval()


class LaterLayersScale:
    """A factor on what the layers after the drafter add, which leaves the weights as they are
    until `fix`."""

    def __init__(self, model: Any, shape: ModelShape) -> None:
        self.scale = 1.0
        self._outputs: list[nn.Linear] = [
            output
            for layer in model.model.layers[shape.draft_layers :]
            for output in (layer.self_attn.o_proj, layer.mlp.down_proj)
        ]
        self._hooks = [output.register_forward_hook(self._scaled) for output in self._outputs]

    def _scaled(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * self.scale

    @torch.no_grad()
    def fix(self) -> None:
        """Multiplies the weights by the factor, which from then on cannot be changed."""
        for hook in self._hooks:
            hook.remove()
        for output in self._outputs:
            output.weight.mul_(self.scale)


@contextmanager
def _untouched_generators() -> Iterator[None]:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield
