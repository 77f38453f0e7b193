"""Which recipe trains a head."""

from __future__ import annotations

from outpace.core.lazy import LazyRegistry
from outpace.heads.base import Head
from outpace.train.recipe import Recipe
from outpace.train.recipes.riding import Carrier

REGISTRY = LazyRegistry(
    "recipe",
    "outpace.recipes",
    {
        "step": "outpace.train.recipes.step:StepRecipe",
        "attending": "outpace.train.recipes.attending:AttendingRecipe",
        "eagle": "outpace.train.recipes.eagle:EagleRecipe",
        "block": "outpace.train.recipes.block:BlockRecipe",
        "s2d": "outpace.train.recipes.s2d:S2dRecipe",
        "riding": "outpace.train.recipes.riding:RidingRecipe",
        "ctc": "outpace.train.recipes.ctc:CtcRecipe",
        "diffusion": "outpace.train.recipes.diffusion:DiffusionRecipe",
    },
)


def recipe_for(head: Head, shared: Carrier) -> Recipe:
    """Returns the recipe for a head; ``ConfigError`` where there is none."""
    return recipe_kind(head)(head, shared)


def recipe_kind(head: Head) -> type[Recipe]:
    """Returns of what kind the recipe for a head is; ``ConfigError`` where there is none."""
    kind: type[Recipe] = REGISTRY.find(head.recipe)
    return kind
