"""What a run writes: checked before it, and complete after it whatever a figure does."""

from __future__ import annotations

import errno
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.bench.reports import answered, report
from typer.testing import CliRunner

from outpace.bench import outputs, session
from outpace.bench.contest import BatchJob, BatchTexts, TimedRun
from outpace.bench.outputs import OutputFiles, write_text
from outpace.bench.prompts import Prompt
from outpace.bench.results import Report
from outpace.bench.session import Finished
from outpace.bench.setting import MeasuredSetting
from outpace.bench.summary import SettingRuns
from outpace.cli.bench import app
from outpace.errors import ConfigError


class Words:
    """A tokenizer that writes token numbers."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(map(str, ids))


def finished(name: str = "draft_model") -> Finished:
    made = BatchTexts([[7, 8]])
    runs = [TimedRun(name, 0, 0, 0.5, 0.1, made) for name in ("plain", name)]
    jobs = [BatchJob(((1, 2),), 2, 0.0)]
    found = SettingRuns("plain", [[Prompt("p1", "story", "text")]], jobs, runs)
    base = report()
    return Finished(
        Report({**base.provenance, "model": "m"}, "plain", None, base.cells),
        [MeasuredSetting(base.cells[0], found)],
        Words(),
    )


def test_a_figure_that_cannot_be_drawn_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(report: Report) -> dict[str, bytes]:
        raise ValueError("no such glyph")

    monkeypatch.setattr(outputs, "figures", failing)
    files = OutputFiles(
        tmp_path / "deep" / "r.json", tmp_path / "r.html", tmp_path / "png",
        tmp_path / "r.md", tmp_path / "answers",
    )  # fmt: skip
    with pytest.raises(ValueError, match="no such glyph"):
        files.write(finished())
    assert Report.from_json((tmp_path / "deep" / "r.json").read_text()).cells == report().cells
    assert "[1.90, 2.10]" in (tmp_path / "r.html").read_text()
    assert "| draft_model |" in (tmp_path / "r.md").read_text()
    assert answered(tmp_path / "answers" / "draft_model-b1-t0.jsonl")[0]["turns"] == ["7 8"]


@pytest.mark.parametrize("flag", ["--json", "--html", "--markdown", "--png", "--spec-bench"])
def test_a_place_that_cannot_be_written_is_found_before_the_run(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(session, "run", lambda *a, **k: pytest.fail("it ran"))
    asked = ["run", "--model", "x", "--again", flag, str(tmp_path / "file" / "below")]
    found = CliRunner().invoke(app, asked).exception
    assert isinstance(found, ConfigError)
    assert str(found).startswith(f"{flag}: cannot write")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("verb", "flag"), [(["cost", "--model", "x"], "--json"), (["pair", "make"], "--out")]
)
def test_the_other_verbs_check_theirs_too(verb: list[str], flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = CliRunner().invoke(app, [*verb, flag, str(tmp_path / "file" / "below")]).exception
    assert isinstance(found, ConfigError)
    assert flag in str(found)


def test_checking_leaves_nothing_behind_and_changes_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("old")
    OutputFiles(json=kept, html=tmp_path / "new.html").check()
    assert kept.read_text() == "old"
    assert not (tmp_path / "new.html").exists()
    with pytest.raises(ConfigError, match="--json: cannot write"):
        OutputFiles(json=tmp_path).check()


def test_a_full_disk_leaves_the_report_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, write = tmp_path / "report.json", Path.write_text
    write_text(report, "old")

    def full(path: Path, text: str, **more: Any) -> int:
        write(path, text[:2], **more)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(report, "new text")
    assert report.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_nothing_is_written_over_what_is_read_or_twice(tmp_path: Path) -> None:
    read = tmp_path / "p.jsonl"
    read.write_text('{"prompt": "a"}')
    for flags, said in (
        (["--prompts", str(read), "--json", str(read)], "is read, too: name another file"),
        (["--json", "a.json", "--html", "./a.json"], "--html: 'a.json' is written by --json, too"),
    ):
        found = CliRunner().invoke(app, ["run", "--model", "x", "--again", *flags]).exception
        assert isinstance(found, ConfigError)
        assert said in str(found)
    assert read.read_text() == '{"prompt": "a"}'


@pytest.mark.parametrize(("package", "files"), [("jinja2", "html"), ("matplotlib.figure", "png")])
def test_a_missing_package_is_found_before_the_run(
    package: str, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'outpace\[bench\]'"):
        OutputFiles(**{files: tmp_path / "x"}).check()


def test_the_name_of_an_answer_file_is_a_file_name(tmp_path: Path) -> None:
    name = "ngram K=5 token model=a/b (2)"
    base = finished(name)
    cell = base.settings[0].result
    changed = replace(cell, methods=(cell.methods[0], replace(cell.methods[1], name=name)))
    done = Finished(base.report, [MeasuredSetting(changed, base.settings[0].runs)], Words())
    OutputFiles(spec_bench=tmp_path).write(done)
    assert {f.name for f in tmp_path.iterdir()} == {
        "plain-b1-t0.jsonl",
        "ngram-K=5-token-model=a-b-2-b1-t0.jsonl",
    }
