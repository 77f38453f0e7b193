"""Beam search over the rows of a target."""
