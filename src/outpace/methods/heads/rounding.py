"""A head's weights rounded to integers, so that a draft reads less of them.

What is drafted is verified against the distribution that the rounded head says: the text stays the
target's.
"""

from __future__ import annotations

import copy
from typing import Literal

from outpace.draft.base import Setup
from outpace.errors import ConfigError
from outpace.heads.base import Head
from outpace.targets.cpu.kernels import LEFT_OPEN
from outpace.targets.cpu.native_layers.linear import lay_out_weights
from outpace.targets.cpu.weights.layers import linear_layers
from outpace.targets.cpu.weights.quantize import Quantization, check, pays, quantize


def rounded(head: Head, setup: Setup, *, handed_over: bool) -> Head:
    """Returns a head as the option ``quantization`` wants it.

    handed_over: the head is its owner's. It is rounded only where the option names how, and then a
    copy is. Raises ``ConfigError`` for a kind of rounding that there is not here, and
    ``UnsupportedModel`` where most of the head's weights are not in linear layers.
    """
    asked: Quantization | Literal["auto"] | None = setup.options.quantization
    left_open = setup.cpu_kernels in LEFT_OPEN and setup.target.device.type == "cpu"
    worth = not handed_over and left_open and pays(head)
    rounds: Quantization | None = "int8" if worth else None
    wanted = rounds if asked == "auto" else asked
    if wanted is None:
        return head
    if not linear_layers(head):
        raise ConfigError(
            f"a head of the kind {head.kind!r} has no linear layers to round: leave quantization "
            "out."
        )
    check(wanted, setup.target.device, head.dtype)
    own = copy.deepcopy(head) if handed_over else head
    quantize(own.to(setup.target.device).eval().requires_grad_(False), wanted)
    lay_out_weights(own)
    return own
