"""The experts of a mixture, whose weights stay in quantised blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.cpu.weights.layers import OnDemandWeight

STACKED = ("gate_up_proj", "down_proj")
"""The weights of transformers' modules of experts, one expert's after another's."""


def is_experts(module: Any) -> bool:
    """Whether a module is transformers' own of gated experts, which says how its weights lie."""
    stacked = [module._parameters.get(name) for name in STACKED]
    return hasattr(module, "_apply_gate") and all(
        weight is not None and weight.dim() == 3 for weight in stacked
    )


class BlockExperts(nn.Module):
    """Stands for transformers' module of E experts. Its layers hold all of them, the outputs of one
    after another's, and a product reads those of one.

    ``state_dict`` shows the weights as that module holds them, dequantised.
    """

    def __init__(self, experts: Any) -> None:
        """experts: that module, which lets its own weights go and says what they are for."""
        super().__init__()
        gate_up = experts.gate_up_proj
        count, outputs, inputs = gate_up.shape
        if experts.is_transposed:
            outputs, inputs = inputs, outputs
        self.num_experts, self.hidden_dim, self.intermediate_dim = count, inputs, outputs // 2
        inner, bias = outputs // 2, bool(experts.has_bias)

        def linear(inputs: int, outputs: int) -> Any:
            layer = nn.Linear(inputs, count * outputs, bias=bias, device="meta")
            return layer.to(gate_up.dtype).requires_grad_(False)

        self.gate_proj, self.up_proj = linear(inputs, inner), linear(inputs, inner)
        self.down_proj = linear(inner, inputs)
        for name in experts._parameters:
            experts._parameters[name] = None
        experts._is_hf_initialized = True  # transformers has nothing to make there
        self.like = experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[T, H]`` with each token's experts and their weights, ``[T, K]`` -> ``[T, H]``."""
        made = hidden_states.new_zeros(*top_k_index.shape, self.hidden_dim)  # [T, K, H]
        for expert in torch.unique(top_k_index).tolist():
            tokens, places = torch.where(top_k_index == expert)
            made[tokens, places] = self._computed(expert, hidden_states[tokens])
        return (made * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)

    def _computed(self, expert: int, x: Tensor) -> Tensor:
        """Returns what an expert makes of tokens ``[N, H]``."""
        first, inner = expert * self.intermediate_dim, self.intermediate_dim
        pair = [layer.part(x, first, inner) for layer in (self.gate_proj, self.up_proj)]
        first, inside = expert * self.hidden_dim, self.gated(*pair)
        found: Tensor = self.down_proj.part(inside, first, self.hidden_dim)
        return found

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns what goes into the last product, from what the first two make: ``[..., I]``."""
        found: Tensor = self.like._apply_gate(self._joined(gate, up))
        return found

    def _joined(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns what two layers make, ``[..., I]`` each, as one of transformers' would."""
        if self.like.is_concatenated:
            return torch.cat([gate, up], -1)
        return torch.stack([gate, up], -1).flatten(-2)

    def dequantized(self, dtype: torch.dtype) -> Any:
        """Returns transformers' module with the weights as numbers."""
        for name, weight in self._plain(dtype).items():
            setattr(self.like, name, nn.Parameter(weight, requires_grad=False))
        return self.like

    def _plain(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights as transformers' module holds them."""
        count, like = self.num_experts, self.like
        gate, up, down = (
            layer.weight.to(dtype).view(count, -1, layer.in_features).transpose(1, 2)
            for layer in (self.gate_proj, self.up_proj, self.down_proj)
        )  # [E, K, N] each
        held = {"gate_up_proj": self._joined(gate, up), "down_proj": down}
        if not like.is_transposed:
            held = {name: weight.transpose(1, 2) for name, weight in held.items()}
        if like.has_bias:
            gate, up, down = (
                layer.bias.to(dtype).view(count, -1)
                for layer in (self.gate_proj, self.up_proj, self.down_proj)
            )
            held |= {"gate_up_proj_bias": self._joined(gate, up), "down_proj_bias": down}
        return {name: weight.contiguous() for name, weight in held.items()}

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **how: Any) -> Any:
        """Returns the weights under the names of transformers' module, once they are in blocks."""
        if not isinstance(self.gate_proj, OnDemandWeight):
            return super().state_dict(*args, destination=destination, prefix=prefix, **how)
        found = {} if destination is None else destination
        for name, weight in self._plain(torch.float32).items():
            found[prefix + name] = weight
        return found
