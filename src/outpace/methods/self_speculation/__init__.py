"""Drafters that are a part of the target itself: no other model, no other cache."""
