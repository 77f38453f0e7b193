"""What a report says about the machine, the command and the source that it came from."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

import outpace
from outpace.bench.provenance import commit, printable_command, provenance
from outpace.targets.cpu.library.processor import LEVEL, levels_below, this_processor


def git(folder: Path, *arguments: str) -> None:
    known = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", *known, *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)


def checkout(folder: Path, package: str) -> Path:
    """Makes a repository with one commit that holds a package; returns the package's folder."""
    inside = folder / package
    inside.mkdir(parents=True)
    (inside / "__init__.py").touch()
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "one")
    return inside


def test_it_names_what_matters() -> None:
    found = provenance(["outpace", "bench"])
    assert {"torch", "transformers", "cpu", "threads", "load", "time"} <= set(found)
    assert found["outpace"] == outpace.__version__


def test_a_command_shows_no_folders() -> None:
    given = ["/home/somebody/outpace", "bench", "--model", "/data/secret/target", "../x/p.jsonl"]
    assert printable_command(given) == "outpace bench --model target ../x/p.jsonl"
    assert printable_command(["outpace", "--json=/secret/r.json"]) == "outpace --json=r.json"
    assert printable_command(["outpace", "--data", "~/secret"]) == "outpace --data secret"
    several = ["outpace", "--prompts", "builtin,/secret/a.jsonl,/secret/b.jsonl"]
    assert printable_command(several) == "outpace --prompts builtin,a.jsonl,b.jsonl"


def test_a_command_can_be_typed_again() -> None:
    config = {"method": "draft_model", "model": "/data/secret/drafter", "verify": {"name": "block"}}
    given = ["outpace", "--speculative-config", json.dumps(config), "--prompts", "my file.jsonl"]
    read = shlex.split(printable_command(given))
    assert json.loads(read[2]) == {**config, "model": "drafter"}
    assert read[3:] == given[3:]
    broken = ["outpace", "--llm", "{not json"]
    assert shlex.split(printable_command(broken)) == broken


def test_the_commit_is_that_of_a_checkout_of_outpace(tmp_path: Path) -> None:
    package = checkout(tmp_path, "src/outpace")
    clean = commit(package)
    assert clean is not None
    (package / "__init__.py").write_text("changed = True\n")
    assert commit(package) == f"{clean}+"


@pytest.mark.parametrize("place", [".venv/lib/site-packages/outpace", "vendor/src/outpace"])
def test_the_commit_of_an_enclosing_project_is_not_ours(place: str, tmp_path: Path) -> None:
    assert commit(checkout(tmp_path, place)) is None


def test_a_package_outside_of_git_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit(tmp_path) is None


def test_kernels_that_are_held_to_less_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of a lowered processor must not be taken for its own."""
    for level in levels_below(this_processor()):
        monkeypatch.setenv(LEVEL, level)
        assert provenance()["instructions"].endswith(f"lowered by {LEVEL}={level}")
