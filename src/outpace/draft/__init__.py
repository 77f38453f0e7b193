"""Drafters: one file each. They see the batch, never the target's model or cache."""
