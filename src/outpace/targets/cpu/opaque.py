"""Operators that a compiler leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def opaque(name: str, product: Callable[..., Any], shape: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as an operator ``outpace::name``, for use inside compiled code only.

    torch's compiler takes its own packed products for constants of the graph, and fails where they
    are not. shape: the same arguments to an empty tensor of the result's shape.
    """
    operator = torch.library.custom_op(f"outpace::{name}", product, mutates_args=())
    operator.register_fake(shape)
    return operator
