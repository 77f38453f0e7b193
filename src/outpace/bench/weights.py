"""Random weights whose text wanders, and a dial for how much the later layers matter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outpace.bench.library import transformers
from outpace.bench.model_shapes import ModelShape

_EMBEDDING = 0.02
_ATTENTION = 2.0
"""Gain of query and key: scores peaked enough that the text depends on what stood where. With 1
it is nearly an average, which changes little from token to token, and texts begin to cycle."""
_MLP = 2.0


def random_model(shape: ModelShape, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """Returns the target before calibration. The weights are a function of shape, seed, dtype and
    the kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    with _untouched_generators(), device:
        model = transformers().AutoModelForCausalLM.from_config(
            shape.config(shape.layers), dtype=dtype
        )
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
        # Fan-in scaling: each layer adds about as much as it was given, so that the embedding of
        # the last token alone never decides the next one.
        parameter.normal_(0, gain / math.sqrt(parameter.shape[1]), generator=generator)


def _sharpen(model: nn.Module, shape: ModelShape, generator: torch.Generator) -> None:
    """Sets the final norm so that the law is about as uncertain as a language model's.

    Gaussian logits over V tokens are dominated by their largest once their deviation passes
    sqrt(2 ln V). The signs undo what a head tied to the embedding would otherwise prefer: the token
    that was just read, or the one that it was read after.
    """
    weight: Any = model.model.norm.weight  # type: ignore[union-attr]
    deviation = math.sqrt(2 * math.log(shape.vocab))
    signs = torch.randint(0, 2, weight.shape, generator=generator, device=weight.device) * 2 - 1
    weight.copy_(signs * deviation / (_EMBEDDING * math.sqrt(shape.hidden)))


def first_layers(model: Any, shape: ModelShape) -> Any:
    """Returns the drafter, the model's first layers under its own norm and head; weights shared."""
    with torch.device("meta"):
        drafter = transformers().AutoModelForCausalLM.from_config(
            shape.config(shape.draft_layers), dtype=model.dtype
        )
    own = dict(model.state_dict())
    drafter.load_state_dict({name: own[name] for name in drafter.state_dict()}, assign=True)
    drafter.tie_weights()
    # The rotary table is no weight: it is not in the state that was just loaded.
    drafter.model.rotary_emb = model.model.rotary_emb
    return drafter.eval()


class Dial:
    """The scale of what the layers behind the drafter add, turned without touching the weights."""

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
        """Writes the scale into the weights and takes the dial off."""
        for hook in self._hooks:
            hook.remove()
        for output in self._outputs:
            output.weight.mul_(self.scale)


@contextmanager
def _untouched_generators() -> Iterator[None]:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield
