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
from outpace.methods.self_speculation.partial import (
    DraftExitOption,
    PartialDrafter,
    PartialOptions,
    parse_draft_exit,
)
from outpace.methods.self_speculation.skipped_layers import (
    SkippedLayers,
    default_skipped_layers,
    load_skipped_layers,
    sub_layers,
)
from outpace.targets.base import SubLayers
from outpace.targets.hf.loading.loaded import LoadedModel

EVEN = "even"


def _layers(name: str, value: Any) -> Any:
    even = isinstance(value, str) and value == EVEN  # an array would compare by element
    if even or isinstance(value, (SkippedLayers, SubLayers)):
        return value
    return (
        load_skipped_layers(value) if isinstance(value, (str, os.PathLike)) else sub_layers(value)
    )


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
    needs: Needs = Needs(full_prefill=True)

    @classmethod
    def build(cls, setup: Setup) -> LayerSkip:
        """Raises ``ConfigError`` for layers that the target does not have, or that were chosen for
        another model."""
        layers, loaded = setup.options.layers, setup.loaded
        if isinstance(layers, SkippedLayers):
            skipped = layers.for_model(loaded)
        elif layers == EVEN:
            skipped = default_skipped_layers(loaded.config.num_hidden_layers)
        else:
            skipped = SkippedLayers.checked(layers, loaded)
        ending = parse_draft_exit(setup.options.draft_exit)
        return cls(setup.target, setup.target.view(skipped), ending)

    def leave_out(self, skipped: SubLayers) -> None:
        """Drafts without other parts from now on."""
        self.view = self.target.view(skipped)
        self.pass_bytes = self.view.pass_bytes

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        # The first layer's, so that what is written after it is not what the target writes there.
        return {"layers": {"attention": [], "mlp": [0]}, "draft_exit": 0.05}
