"""How a model is recognised by what was trained over its states."""

from __future__ import annotations

from outpace.heads.base import TargetShape
from outpace.heads.classifiers.origin import Origin
from outpace.targets.hf.loading.loaded import Loaded, probe_states


def origin_of(loaded: Loaded) -> Origin:
    """Returns what a model is recognised by; takes one pass over a few tokens."""
    return Origin(TargetShape.of(loaded.config, loaded.name), probe_states(loaded))
