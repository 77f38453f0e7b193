"""The pages about rules: the example works, the tables are the gate's, the list is complete."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.gate_table import HEAD, markdown

from outpace.audit.gate.enumeration import _rules, audit_distributions
from outpace.audit.gate.gate_trees import FAST
from outpace.audit.pytest_plugin import outpace_audit  # noqa: F401
from outpace.core.options import options_of
from outpace.core.proposal import DraftSampling
from outpace.errors import ConfigError
from outpace.verify.base import RuleNeeds
from outpace.verify.registry import rules

PAGES = Path(__file__).parents[2] / "docs" / "rules"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def test_the_example_rule_passes_the_gate(outpace_audit: Any) -> None:  # noqa: F811
    rule, test = blocks("adding.md")
    scope: dict[str, Any] = {"__name__": "example"}
    exec(rule, scope)
    exec(test, scope)
    scope["test_timid"](lambda rules: outpace_audit(rules, shapes=FAST[:3], pairs=10))
    assert scope["TimidRule"](share=0.3).share == 0.3
    with pytest.raises(ConfigError, match="share"):
        scope["TimidRule"](share=2)


def test_the_example_rule_may_come_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace.core import lazy
    from outpace.verify import registry

    scope: dict[str, Any] = {"__name__": "example"}
    exec(blocks("adding.md")[0], scope)

    class Entry:
        name, value = "timid", "my_package.timid:TimidRule"

        @staticmethod
        def load() -> Any:
            return scope["TimidRule"]

    monkeypatch.setattr(lazy, "_entry_points", lambda group: (Entry,))
    assert registry.make_rule("timid", share=0.7).share == 0.7  # type: ignore[attr-defined]
    Entry.name = "token"
    with pytest.raises(ConfigError, match="name of another one"):
        registry.rules()


def test_the_front_page_runs() -> None:
    exec(blocks("README.md")[0].replace('drafters=["iid"]', 'drafters=["iid"], pairs=3'), {})


def tables() -> tuple[list[list[str]], list[list[str]]]:
    """The cells of the front page's tables: of the rules, and of what a rule may ask for."""
    lines = (PAGES / "README.md").read_text().splitlines()
    rows = [line.split("|")[1:-1] for line in lines if re.match(r"\| `", line)]
    return [row for row in rows if len(row) == 9], [row for row in rows if len(row) == 3]


def test_what_rules_ask_for_is_right() -> None:
    needs, asked = tables()[1], {cells[0].strip(" `"): cells[8] for cells in tables()[0]}
    names = [field.name for field in fields(RuleNeeds)]
    assert {cells[0].strip(" `") for cells in needs} == set(names)
    for rule in _rules(None):
        unlike = [name for name in names if getattr(rule.needs, name) != getattr(RuleNeeds(), name)]
        assert set(re.findall(r"`(\w+)`", asked[rule.name])) == set(unlike), rule.name


def test_the_list_of_rules_is_right() -> None:
    table, _ = tables()
    found = {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in table}
    assert list(found) == list(rules())
    for name, rule in rules().items():
        columns = [
            rule.lossless,
            *(kind in rule.takes for kind in DraftSampling),
            rule.trees,
        ]
        assert [cell == "yes" for cell in found[name][:6]] == columns
        listed = re.findall(r"`(\w+)`", found[name][6])
        assert listed == [one.name for one in options_of(rule)], name


def test_every_rule_has_its_section() -> None:
    lossless = (PAGES / "lossless.md").read_text()
    lossy = (PAGES / "lossy.md").read_text()
    for name, rule in rules().items():
        assert f"\n## {name}\n" in lossless if rule.lossless else f"- **{name}**" in lossy


def test_the_table_is_the_gates() -> None:
    report = audit_distributions(["token", "ears"], ["iid"], shapes=FAST[:3], pairs=5)
    head, rule, token, ears = markdown(report).splitlines()
    assert head == f"| {' | '.join(HEAD)} |"
    assert rule.count("|") == token.count("|") == ears.count("|") == len(HEAD) + 1
    assert token.startswith("| token | iid | 0 | 0 |")


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1], ids=["lossless", "lossy"])
def test_the_tables_are_up_to_date(place: int, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    page = "../../lab/results/gate.md"
    exec(blocks(page)[place], {})
    assert capsys.readouterr().out.strip() in (PAGES / page).read_text()
