"""The distribution gate: what a rule emits, by enumeration."""
