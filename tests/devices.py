"""The device that models of the tests are on.

A CPU, unless ``OUTPACE_TEST_DEVICE`` names another one: ``make gpu`` runs the tests of drafters,
rules and the engine on a GPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device(os.environ.get("OUTPACE_TEST_DEVICE", "cpu"))


def on_device(values: Any, **options: Any) -> Tensor:
    """Returns numbers, in lists, as a tensor where the models of the tests are."""
    return torch.tensor(values, device=DEVICE, **options)


def cpu_only(reason: str) -> pytest.MarkDecorator:
    """Marks a test of what there is on a CPU only. reason: why, in a whole sentence."""
    return pytest.mark.skipif(DEVICE.type != "cpu", reason=reason)
