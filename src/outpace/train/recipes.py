"""Which recipe trains a head."""

from __future__ import annotations

from outpace.errors import ConfigError
from outpace.heads.attending import AttendingHead
from outpace.heads.base import Head, StepHead
from outpace.heads.ctc import Ctc
from outpace.heads.riding import RidingHead
from outpace.train.attending_recipe import AttendingRecipe
from outpace.train.ctc_recipe import CtcRecipe
from outpace.train.marks import Recipe
from outpace.train.riding_recipe import Carrier, RidingRecipe
from outpace.train.step_recipe import StepRecipe


def recipe_for(head: Head, shared: Carrier) -> Recipe:
    """Returns the recipe for a head; ``ConfigError`` where there is none."""
    if isinstance(head, StepHead):
        return StepRecipe(head, shared)
    if isinstance(head, AttendingHead):
        return AttendingRecipe(head, shared)
    if isinstance(head, RidingHead):
        return RidingRecipe(head, shared)
    if isinstance(head, Ctc):
        return CtcRecipe(head, shared)
    raise ConfigError(f"nothing is known of how to train a {head.kind} head.")
