"""Settings of the whole suite: one thread, nothing random between two runs, warnings are errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=30)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _same_global_generator() -> None:
    """Tests may draw tensors from the global generator; the library itself never does."""
    torch.manual_seed(0)
