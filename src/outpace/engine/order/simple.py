"""Orders that remember nothing."""

from __future__ import annotations

from outpace.engine.order.base import Order
from outpace.engine.request import Request


class FirstCome(Order):
    """First come, first served."""

    name = "fcfs"

    def key(self, request: Request) -> tuple[float, ...]:
        return ()


class ByPriority(Order):
    """The smallest number first, as in vLLM; equal ones as they come."""

    name = "priority"

    def key(self, request: Request) -> tuple[float, ...]:
        return (request.priority,)
