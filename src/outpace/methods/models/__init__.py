"""Drafters that run a smaller language model."""
