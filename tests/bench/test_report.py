"""Reports: JSON there and back, pages that hold everything, tables."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.bench.reports import DRAFTED, report, wide_report

from browser import DESK, PHONE, started
from outpace.bench.costs import CostReport, cost_rows, curve_of
from outpace.bench.divergence import Divergence
from outpace.bench.outputs import OutputFiles, html_page
from outpace.bench.plots import figures
from outpace.bench.results import (
    Report,
)
from outpace.bench.statistics import Interval, TextDifference
from outpace.bench.table import markdown
from outpace.bench.theory import Times
from outpace.core.account import Account, Mode
from outpace.errors import ConfigError

PNG = b"\x89PNG\r\n"


def lossy(divergence: Divergence | None) -> Report:
    base = report()
    cell = base.cells[0]
    wrong = replace(cell.methods[1], lossless=False, rule="lenient", divergence=divergence)
    return replace(base, cells=(replace(cell, methods=(cell.methods[0], wrong)),))


def test_json_goes_out_and_comes_back() -> None:
    text = report().to_json()
    assert Report.from_json(text) == report()
    assert json.loads(text)["schema"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no report"),
        ("{}", "no report"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1, "surprise": 2}', "surprise"),
        ('{"schema": 1, "cells": [[]]}', "SettingResult cannot be made of"),
    ],
)
def test_other_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Report.from_json(text)


def test_the_page_holds_its_figures_and_numbers_and_fetches_nothing() -> None:
    made = figures(report())
    assert set(made) == {
        "speedup-by-task-b1-t0",
        "acceptance-by-position-b1-t0",
        "time-split-b1-t0",
        "cost-by-column-b1-t0",
        "speedup-by-length-b1-t0",
    }
    assert all(png.startswith(PNG) for png in made.values())
    page = html_page(report(), made)
    embedded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert {base64.b64decode(data) for data in embedded} == set(made.values())
    assert "http" not in page
    assert "<script" not in page
    for shown in ("2.00 x", "[1.90, 2.10]", "0.955", "90 %", "11/12", "it is asleep", "1.50 x"):
        assert shown in page, shown
    assert "Acceptance by position in the draft" in page
    assert "a &lt;cpu&gt;" in page, "what a machine says about itself is text"


def test_the_page_says_what_its_words_mean_and_no_table_leaves_it() -> None:
    page = html_page(wide_report([f"method {i}" for i in range(9)], ["story"]), {})
    heads = {re.sub(r"<[^>]+>|, ms|, MB", "", h) for h in re.findall(r"<th>(.*?)</th>", page)}
    words = " ".join(re.findall(r"<dt>(.*?)</dt>", page))
    known = {"method", "task", "tokens/s", "measured", "measured / predicted"}
    unexplained = [h for h in heads - known if h not in words and not h.startswith("method ")]
    assert not unexplained
    tables = page.count("<table>")
    assert tables == page.count('<div class="table"><table>') == page.count("</table></div>") > 3
    assert re.search(r"\.table \{[^}]*overflow-x: auto", page)


def test_a_lossy_rule_is_written_with_its_divergence_only() -> None:
    hidden = lossy(None)
    for write in (hidden.to_json, lambda: html_page(hidden, {}), lambda: markdown(hidden)):
        with pytest.raises(ConfigError, match="'lenient' is lossy"):
            write()
    shown = lossy(Divergence(0.055, 0.2, 64, 0.001))
    assert "lossy, TV 0.055" in html_page(shown, {})
    assert "0.055 per token over 64 states" in markdown(shown)
    assert Report.from_json(shown.to_json()) == shown


def test_markdown_has_a_row_per_method_and_the_notes() -> None:
    text = markdown(report())
    assert "| draft_model | 40.0 | 2.00 [1.90, 2.10] | 1.87 |" in text
    assert "1 of 12 texts differ from the baseline's (near-ties)" in text
    assert "hf did not take part: it is asleep." in text
    assert "1.50 x hf" in text


def with_speedup(interval: Interval, drafted: bool = True) -> Report:
    base = report()
    cell = base.cells[0]
    ours = cell.methods[1]
    counts = ours.acceptance if drafted else None
    task = replace(ours.tasks[0], speedup=interval, acceptance=counts)
    ours = replace(
        ours, speedup=interval, decode_speedup=interval, acceptance=counts, tasks=(task,)
    )
    ours = replace(ours, over_peers={"hf": interval})
    return replace(base, cells=(replace(cell, methods=(cell.methods[0], ours)),))


def test_no_ratio_is_told_that_noise_may_have_made() -> None:
    found = with_speedup(Interval(0.97, 0.91, 1.04, 12))
    assert "| draft_model | 40.0 | none [0.91, 1.04] | 1.87 | none [0.91, 1.04] |" in markdown(
        found
    )
    assert "no difference [0.91, 1.04] to hf" in markdown(found)
    page = html_page(found, {})
    for text in (page, markdown(found)):
        assert "0.97" not in text
        assert "[0.91, 1.04]" in text
    assert "0.97" in found.to_json(), "for whoever computes with it"


def test_without_a_draft_there_is_no_speed_up() -> None:
    found = with_speedup(Interval(1.3, 1.2, 1.4, 12), drafted=False)
    assert "| draft_model | 40.0 | nothing drafted |  |  |" in markdown(found)
    assert "1.30" not in markdown(found).replace("1.30 [1.20, 1.40] x hf", "")
    page = html_page(found, {})
    assert "<td>nothing drafted</td><td>\u2013</td><td>\u2013</td>" in page
    assert page.count("nothing drafted") == 2, "in both tables"


def test_a_report_says_what_was_drafted_and_why_not_more() -> None:
    told = "draft_model: draft model: 100 tokens in 33 of 33 rounds, 70% accepted"
    assert told in markdown(report())
    assert told in html_page(report(), {})
    assert Report.from_json(report().to_json()).cells[0].methods[1].account == Account(
        Mode.MEASURED, 33, (DRAFTED,)
    )


def test_both_reports_give_the_same_cause_of_texts_that_differ() -> None:
    base = report()
    cell = base.cells[0]
    ours = cell.methods[1]
    assert ours.identity is not None
    far = replace(ours.identity, differences=(TextDifference("p1", 3, 5, 6, 1.0),))
    theirs = replace(ours, name="hf", identity=far, over_peers={})
    wrong = replace(ours, name="suffix", identity=far)
    told = replace(base, cells=(replace(cell, methods=(cell.methods[0], ours, theirs, wrong)),))
    causes = {
        "draft_model": "near-ties",
        "hf": "another program, which rounds in its own way",
        "suffix": "NOT explained by rounding",
    }
    page = html_page(told, {})
    for name, cause in causes.items():
        assert f"{name}: 1 of 12 texts differ from the baseline's ({cause})" in markdown(told)
        said = f"{name}: 1 of 12 texts differ from the\nbaseline's ({cause})"
        assert said.replace("'", "&#39;") in page.replace("'", "&#39;")
    colours = re.findall(r'<span class="(note|bad)">11/12', page)
    assert colours == ["note", "note", "bad"]


def test_a_page_of_texts_to_their_ends_does_not_say_that_all_are_as_long() -> None:
    base = report()
    same = "the same number of tokens"
    assert same in html_page(base, {})
    ended = replace(base, cells=(replace(base.cells[0], to_end=True),))
    assert same not in html_page(ended, {})
    assert "to where the target ends it" in " ".join(html_page(ended, {}).split())


def test_cost_reports_go_out_and_come_back(tmp_path: Path) -> None:
    times = Times({1: 0.01, 4: 0.04}, {1: 0.05, 5: 0.06})
    found = CostReport({"cpu": "x"}, "target", "drafter", 1e10, (curve_of(1, 128, times),))
    files = OutputFiles(tmp_path / "c.json", tmp_path / "c.html", tmp_path / "png")
    files.write(found)
    assert CostReport.from_json((tmp_path / "c.json").read_text()) == found
    page = (tmp_path / "c.html").read_text()
    assert page.count("data:image/png") == 2
    assert "2.50 x" in page  # 5 tokens for .04 + .06 s against .05 s each
    assert len(list((tmp_path / "png").iterdir())) == 2
    title, header, rows = cost_rows(found.curves[0])
    assert "at most 2.50x (K=4)" in title
    assert header == ["tokens", "scored, ms", "over one", "drafted, ms"]
    assert rows == [
        ["1", "50.00", "1.00", "10.00"],
        ["4", "", "", "40.00"],
        ["5", "60.00", "1.20", ""],
    ]
    with pytest.raises(ConfigError, match="no report"):
        CostReport.from_json("<html>")


HEADS = """() => [...document.querySelectorAll("th")].flatMap((head) => {
  const texts = document.createTreeWalker(head, NodeFilter.SHOW_TEXT), broken = [];
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    for (const word of node.data.matchAll(/[^\\s-]+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
      if (lines.size > 1) broken.push(word[0]);
    }
  }
  return broken;
})"""


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_no_header_is_broken_inside_a_word(size: dict[str, int]) -> None:
    names = ["draft_model K=auto recursive", "suffix", "openvino-assisted-5"]
    pages = [
        html_page(wide_report(names, ["story", "summarization"]), {}),
        html_page(report(), {}),
    ]
    with started() as browser:
        for html in pages:
            page = browser.new_page(viewport=size)
            page.set_content(html)
            assert page.evaluate(HEADS) == []
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.close()
