"""Temperature tuning (Llama 4): queries of layers without rotary angles grow with their position
("Scalable-Softmax Is Superior for Attention"). The model counts positions by columns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from outpace.targets.hf.slots.masks import Layout
from outpace.targets.hf.telling import exchange
from outpace.targets.hf.telling.teller import Teller


def tellers(model: nn.Module) -> Iterator[Teller]:
    """Yields what tells a model's layers the positions of their queries."""
    for module in model.modules():
        tuned = getattr(module, "attn_temperature_tuning", False) and hasattr(module, "floor_scale")
        if tuned and not getattr(module, "use_rope", False):
            yield Temperature(module)


class Temperature(Teller):
    """A layer that scales its queries: here they are scaled as they come out of their product."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module

    @contextmanager
    def told(self, layout: Layout) -> Iterator[None]:
        module = self._module
        steps = torch.floor((layout.positions.float() + 1.0) / module.floor_scale)
        scales = (torch.log1p(steps) * module.attn_scale + 1.0)[..., None]  # [A, T, 1]
        with (
            exchange.attribute(module, "attn_temperature_tuning", False),
            exchange.result(module.q_proj, lambda queries: (queries * scales).to(queries.dtype)),
        ):
            yield
