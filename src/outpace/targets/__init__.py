"""Targets, the models that are decoded: their protocol and its implementations."""
