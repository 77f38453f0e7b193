"""What the installed transformers is too old for. Where code works with every version that is
supported, it asks for none: this is for what an older one cannot do at all."""

from __future__ import annotations

import transformers
from packaging.version import Version

INSTALLED: str = transformers.__version__

WRONG_BEFORE = {"doge": "5.18", "git": "5.18", "umt5": "5.18"}
"""Types of models whose code went wrong over drafted tokens, and the transformers that put it
right."""


def older_than(version: str) -> bool:
    """Whether the installed transformers is older than a version."""
    return Version(INSTALLED) < Version(version)


def too_old_for(model_type: str) -> str | None:
    """Returns the transformers that a type of models needs, None if the installed one will do."""
    needed = WRONG_BEFORE.get(model_type)
    return needed if needed is not None and older_than(needed) else None
