"""The files in deploy/ name what there is."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from outpace import LLM

from .conftest import call, running

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


pytestmark = pytest.mark.skipif(
    not DEPLOY.is_dir(), reason="the tests run without the repository's deploy/"
)


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


def test_the_image_gets_what_the_package_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = ["pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]]
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    wanted += [
        wheel["hooks"]["custom"]["path"],
        *(folder.split("/")[0] for folder in wheel["packages"]),
    ]
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    assert set(wanted) <= copied


def test_compose_mounts_files_that_there_are() -> None:
    mounted = re.findall(r'"\./([^":]+):', (DEPLOY / "compose.yaml").read_text())
    named = [name for name in mounted if name != "models"]
    assert len(named) == 4
    assert all((DEPLOY / name).is_file() for name in named)
