"""Heads that draft a block of tokens at once, by diffusion."""
