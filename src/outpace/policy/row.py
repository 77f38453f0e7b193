"""What the choice of how much to draft looks at in a text: its request."""

from __future__ import annotations

from outpace.core.request import Request

DraftingRow = Request
"""The name that the measuring controllers have for it."""
