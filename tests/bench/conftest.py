"""One tiny synthetic pair for all benchmark tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace.bench.model_shapes import shape_named
from outpace.bench.synthetic import Pair, PairOptions, make_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    options = PairOptions(agreement=0.75, texts=4, tokens=24, tolerance=0.06, rounds=3)
    return make_pair(shape_named("tiny"), options, Path(tmp_path_factory.mktemp("pair")))
