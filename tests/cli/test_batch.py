"""``outpace batch``: what it refuses, and what it says."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from processes import START_SECONDS

from .conftest import Run
from .test_mistakes import assert_one_sentence

LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "w1 w2", "max_tokens": 3, "temperature": 0, "ignore_eos": True},
}


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(LINE) + "\n")
    return path


def test_a_file_is_answered(run: Run, requests: Path, target: Path) -> None:
    out = requests.with_name("out.jsonl")
    first = run("batch", requests, out, "-m", target)
    assert first.exit_code == 0, first.stderr
    assert "3 tokens in " in first.stderr
    (answer,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert answer["custom_id"] == "a"
    assert answer["response"]["body"]["model"] == "target"
    again = run("batch", requests, out, "-m", target)
    assert again.exit_code == 0
    assert "holds 1 of 1 answers" in again.stderr
    assert len(out.read_text().splitlines()) == 1


def test_lines_that_failed_are_counted(run: Run, requests: Path, target: Path) -> None:
    requests.write_text(json.dumps({**LINE, "body": {"prompt": "w1", "model": "other"}}))
    result = run("batch", requests, requests.with_name("out.jsonl"), "-m", target)
    assert result.exit_code == 4
    assert "1 of 1 lines failed (the first: line 1: there is no model 'other' here" in result.stderr


def test_files_that_do_not_go_together_are_refused(run: Run, requests: Path) -> None:
    missing = requests.with_name("missing")
    assert_one_sentence(run("batch", missing, requests), "there is no file")
    assert_one_sentence(run("batch", requests, requests), "written over the requests")
    assert_one_sentence(run("batch", requests, missing / "out"), "there is no folder")
    for path in ("/dev/null", requests.parent):
        assert_one_sentence(run("batch", requests, path), "is no file: answers are read again")


def test_a_job_whose_disk_is_full_says_so_and_goes_on(
    requests: Path, target: Path, run: Run
) -> None:
    lines = [json.dumps({**LINE, "custom_id": str(number)}) for number in range(4)]
    requests.write_text("\n".join(lines))
    out = requests.with_name("out.jsonl")

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1800, 1800))

    # -B: a module's bytecode would be cut off as well, and everybody would read it from then on.
    outpace = [sys.executable, "-B", "-W", "ignore", "-m", "outpace"]
    done = subprocess.run(
        [*outpace, "batch", requests, out, "-m", target],
        preexec_fn=small_disk,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith(f"outpace: File too large: '{out}'.\n")
    assert "Traceback" not in done.stderr
    assert 0 < out.read_text().count("\n") < 4
    again = run("batch", requests, out, "-m", target)
    assert again.exit_code == 0, again.stderr
    found = [json.loads(line)["custom_id"] for line in out.read_text().splitlines()]
    assert sorted(found) == ["0", "1", "2", "3"]


def test_without_ray_its_flags_are_refused(
    run: Run, requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "outpace.ray", raising=False)
    for words in (("batch", requests, "out", "--ray", 2), ("serve", "--replicas", 2)):
        assert_one_sentence(run(*words), "pip install 'outpace[ray]'")
