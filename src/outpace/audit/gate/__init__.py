"""The law gate: what a rule emits, by enumeration."""
