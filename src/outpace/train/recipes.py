"""Which recipe trains a head."""

from __future__ import annotations

from outpace.core.lazy import LazyRegistry
from outpace.heads.base import Head
from outpace.train.marks import Recipe
from outpace.train.riding_recipe import Carrier

REGISTRY = LazyRegistry(
    "recipe",
    "outpace.recipes",
    {
        "step": "outpace.train.step_recipe:StepRecipe",
        "attending": "outpace.train.attending_recipe:AttendingRecipe",
        "eagle": "outpace.train.eagle_recipe:EagleRecipe",
        "block": "outpace.train.block_recipe:BlockRecipe",
        "s2d": "outpace.train.s2d_recipe:S2dRecipe",
        "riding": "outpace.train.riding_recipe:RidingRecipe",
        "ctc": "outpace.train.ctc_recipe:CtcRecipe",
        "diffusion": "outpace.train.diffusion_recipe:DiffusionRecipe",
    },
)


def recipe_for(head: Head, shared: Carrier) -> Recipe:
    """Returns the recipe for a head; ``ConfigError`` where there is none."""
    kind: type[Recipe] = REGISTRY.find(head.recipe)
    return kind(head, shared)
