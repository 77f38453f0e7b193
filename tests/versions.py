"""What the tests need of transformers that its older versions do not have."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from outpace.targets.hf.kinds import older_than, too_old_for


def since(version: str, what: str) -> pytest.MarkDecorator:
    """Skips a test where the installed transformers is older. what: is new in that version."""
    return pytest.mark.skipif(older_than(version), reason=f"{what}: needs transformers {version}")


def known_class(name: str) -> Any:
    """Returns a class of transformers; skips the test where the installed one lacks it."""
    found = getattr(transformers, name, None)
    if found is None:
        pytest.skip(f"{name}: needs a later transformers than {transformers.__version__}")
    return found


def skip_if_wrong(model_type: str) -> None:
    """Skips the test where the code of the installed transformers for a type of models is wrong."""
    needed = too_old_for(model_type)
    if needed is not None:
        pytest.skip(f"{model_type} is read wrong before transformers {needed}")
