"""The target without some of its sub-layers drafts for itself.

Draft & Verify (Zhang et al., ACL 2024, arXiv 2309.08168).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from outpace.core.options import Reads
from outpace.core.proposal import Needs
from outpace.draft.base import Setup
from outpace.methods.self_speculation.chosen import (
    ChosenLayers,
    guessed_sub_layers,
    read_chosen,
    sub_layers,
)
from outpace.methods.self_speculation.partial import (
    DraftExitOption,
    PartialDrafter,
    PartialOptions,
    ending_of,
)
from outpace.targets.base import SubLayers
from outpace.targets.hf.loading.loaded import Loaded

EVEN = "even"


def _layers(name: str, value: Any) -> Any:
    even = isinstance(value, str) and value == EVEN  # an array would compare by element
    if even or isinstance(value, (ChosenLayers, SubLayers)):
        return value
    return read_chosen(value) if isinstance(value, (str, os.PathLike)) else sub_layers(value)


@dataclass(frozen=True, kw_only=True)
class LayerSkipOptions(PartialOptions):
    """What a user may set."""

    layers: Annotated[Any, Reads(_layers)] = EVEN
    """What is left out: the file that `outpace tune layers` wrote, a list of layers,
    {'attention': [...], 'mlp': [...]}, or 'even' for a guess that no model was tried with."""
    draft_exit: DraftExitOption = "adaptive"


class LayerSkip(PartialDrafter):
    """Drafts with the target itself, some attention and MLP parts left out: no further weights, no
    further cache.

    Keys and values that this writes are not the target's. So it reads nothing but the root and its
    own draft; the text before them has been read by the target.
    """

    name: ClassVar[str] = "layer_skip"
    Options: ClassVar[type[Any]] = LayerSkipOptions
    needs: Needs = Needs(prompts=True)

    @classmethod
    def build(cls, setup: Setup) -> LayerSkip:
        """Raises ``ConfigError`` for layers that the target does not have, or that were chosen for
        another model."""
        layers, loaded = setup.options.layers, setup.loaded
        if isinstance(layers, ChosenLayers):
            skipped = layers.for_model(loaded)
        elif layers == EVEN:
            skipped = guessed_sub_layers(loaded.config.num_hidden_layers)
        else:
            skipped = ChosenLayers.checked(layers, loaded)
        ending = ending_of(setup.options.draft_exit)
        return cls(setup.target, setup.target.view(skipped), ending)

    def leave_out(self, skipped: SubLayers) -> None:
        """Drafts without other parts from now on."""
        self.view = self.target.view(skipped)
        self.pass_bytes = self.view.pass_bytes

    @classmethod
    def specimen(cls, loaded: Loaded) -> Mapping[str, Any]:
        # The first layer's, so that what is written after it is not what the target writes there.
        return {"layers": {"attention": [], "mlp": [0]}, "draft_exit": 0.05}
