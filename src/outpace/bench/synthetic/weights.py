"""Random weights that generate varied text, and a factor on what the later layers add."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outpace.bench.library import transformers
from outpace.bench.synthetic.model_shapes import ModelShape

_EMBEDDING = 0.02
_ATTENTION = 2.0
"""Gain of query and key. With 1 attention is nearly an average, which changes little from token to
token, and texts begin to cycle; with 2 the next token depends on which token stood where."""
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
    with torch.device("meta"):
        drafter = transformers().AutoModelForCausalLM.from_config(
            shape.config(shape.draft_layers), dtype=model.dtype
        )
    own = dict(model.state_dict())
    drafter.load_state_dict({name: own[name] for name in drafter.state_dict()}, assign=True)
    drafter.tie_weights()
    # The table of rotary angles is not among the weights that were just loaded.
    drafter.model.rotary_emb = model.model.rotary_emb
    return drafter.eval()


class LaterLayersScale:
    """A factor on what the layers behind the drafter add, which leaves the weights as they are
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
