"""Drafters with heads that draft a block of tokens at once."""
