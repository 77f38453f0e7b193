"""The exactness gate: every rule against the target's distribution, by enumeration and not by
statistics."""
