"""Orders by name."""

from __future__ import annotations

from outpace.engine.order.base import Order
from outpace.engine.order.fair import Fair
from outpace.engine.order.shortest import Shortest
from outpace.engine.order.simple import ByPriority, FirstCome

ORDERS: dict[str, type[Order]] = {
    "fcfs": FirstCome,
    "priority": ByPriority,
    "fair": Fair,
    "shortest": Shortest,
}
"""Each order by its name."""
