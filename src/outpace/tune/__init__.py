"""Searches that fit a drafter to a user's own model and prompts."""
