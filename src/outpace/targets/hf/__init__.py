"""Targets that are transformers models."""
