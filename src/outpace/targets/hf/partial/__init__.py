"""Passes of a part of a model, or with columns that ride along."""
