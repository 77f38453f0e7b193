"""Drafters with heads that attend over the whole text."""
