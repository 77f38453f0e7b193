"""The files in deploy/ name what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outpace import LLM

from .conftest import call, running

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.mark.skipif(not DEPLOY.is_dir(), reason="the tests run without the repository's deploy/")
def test_the_dashboard_asks_for_metrics_that_there_are(llm: LLM) -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"outpace:\w+", target["expr"])
    }
    with running(llm) as url:
        call(url, "/v1/completions", {"prompt": "a b", "max_tokens": 20, "speculative": 3})
        told = set(re.findall(r"^(outpace:\w+)", call(url, "/metrics")[1], re.MULTILINE))
    assert len(asked) > 8
    assert asked <= told
