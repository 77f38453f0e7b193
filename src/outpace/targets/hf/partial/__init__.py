"""Passes of a part of a model, or with auxiliary tokens."""
