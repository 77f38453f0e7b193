"""Drafters whose tokens ride in the target's own pass."""
