"""Which recipe trains a head."""

from __future__ import annotations

from outpace.core.lazy import LazyRegistry
from outpace.heads.base import Head, Shared
from outpace.train.marks import Recipe

REGISTRY = LazyRegistry(
    "recipe",
    "outpace.recipes",
    {
        "step": "outpace.train.step_recipe:StepRecipe",
        "attending": "outpace.train.attending_recipe:AttendingRecipe",
        "eagle": "outpace.train.eagle_recipe:EagleRecipe",
        "block": "outpace.train.block_recipe:BlockRecipe",
        "s2d": "outpace.train.s2d_recipe:S2dRecipe",
    },
)


def recipe_for(head: Head, shared: Shared) -> Recipe:
    """Returns the recipe for a head; ``ConfigError`` where there is none."""
    kind: type[Recipe] = REGISTRY.find(head.recipe)
    return kind(head, shared)
