"""Drafters that look tokens up in texts."""
