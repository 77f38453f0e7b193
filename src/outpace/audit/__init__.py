"""The exactness gate: every rule against the target's law, by enumeration and not by statistics."""
