"""Rules are made by name, and nothing in an option is ignored."""

import dataclasses
import doctest

import numpy as np
import pytest
import torch

from outpace.core.options import options_of
from outpace.errors import ConfigError, IncompatibleRule
from outpace.heads.classifiers import JudgeHead
from outpace.verify import base, registry, siblings
from outpace.verify.base import DraftSampling, Evidence, Rule
from outpace.verify.lossless import selection, traversal
from outpace.verify.registry import make_rule, rules

LOSSLESS = {"token", "match", "coupled", "block", "recursive", "kseq", "traversal", "canonical"}


def test_every_rule_says_whether_it_is_lossless() -> None:
    assert {name for name, rule in rules().items() if rule.lossless} == LOSSLESS
    assert all(rule.takes and rule.name == name for name, rule in rules().items())


@pytest.mark.parametrize("name", [name for name in rules() if name != "judge"])
def test_the_defaults_are_in_range(name: str) -> None:
    rule = make_rule(name)
    assert isinstance(rule, Rule)
    defaults = {one.name: one.default for one in options_of(rules()[name])}
    assert make_rule(name, **defaults) == rule or not defaults


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tokn", {}, "did you mean 'token'"),
        ("token", {"lenience": 1}, "has no options"),
        ("lenient", {"leniense": 0.5}, "did you mean 'lenience'"),
        ("lenient", {"lenience": 0}, r"\(0, 1\]"),
        ("lenient", {"lenience": True}, "must be a number"),
        ("ears", {"tolerance": -0.1}, r"\[0, 1\]"),
        ("typical", {"posterior_alpha": "x"}, "posterior_alpha"),
        ("joint", {"threshold": 0.0}, r"\(0, inf\)"),
        ("bild", {"rollback": -1}, "rollback"),
        ("bild", {"fallback": float("nan")}, "fallback"),
        ("confidence", {"loose": 0.9}, "must not be above strict"),
        ("judge", {}, "JudgeHead"),
        ("judge", {"head": JudgeHead(torch.ones(2)), "threshold": 2}, "threshold"),
        ("reflective", {"weight": 1.5}, "weight"),
        ("reflective", {"prompt": ""}, "prompt must be a text"),
        ("lud", {"threshold": 0}, r"\(0, 1\]"),
        ("cascade", {"defer": "optt"}, "did you mean 'opt'"),
        ("canonical", {"alphabet": 2.5}, "whole number"),
    ],
)
def test_a_bad_option_is_named(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rule(name, **options)


def test_numbers_of_numpy_are_taken_like_pythons() -> None:
    rule = make_rule("lenient", lenience=np.float32(0.5))
    assert rule == make_rule("lenient", lenience=0.5)
    assert make_rule("canonical", alphabet=np.int64(3)) == make_rule("canonical", alphabet=3)
    with pytest.raises(ConfigError, match="must be a number in"):
        make_rule("lenient", lenience=np.bool_(True))


def test_rules_are_frozen() -> None:
    rule = make_rule("ears", tolerance=0.2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.tolerance = 0.3  # type: ignore[attr-defined]


def test_given_leaves_the_rule_alone_and_insists_on_what_it_needs() -> None:
    rule = make_rule("reflective")
    with pytest.raises(ConfigError, match="second"):
        rule.with_evidence(Evidence())
    informed = rule.with_evidence(Evidence(second_copy_probs=torch.ones(1, 1, 2) / 2))
    assert informed.evidence.second_copy_probs is not None
    assert rule.evidence.second_copy_probs is None
    judge = make_rule("judge", head=JudgeHead(torch.ones(2)))
    with pytest.raises(ConfigError, match="states"):
        judge.with_evidence(Evidence())
    assert make_rule("token").with_evidence(Evidence()) is not None


@pytest.mark.parametrize("name", ["kseq", "canonical"])
def test_rules_for_independent_drafts_refuse_others(name: str) -> None:
    with pytest.raises(IncompatibleRule, match="without replacement"):
        make_rule(name).check(DraftSampling.WITHOUT_REPLACEMENT, tree=True)


@pytest.mark.parametrize("name", [name for name, rule in rules().items() if not rule.trees])
def test_chain_rules_refuse_trees(name: str) -> None:
    rule = rules()[name]
    head = {"head": JudgeHead(torch.ones(2))} if name == "judge" else {}
    with pytest.raises(IncompatibleRule, match="chains"):
        rule(**head).check(min(rule.takes, key=str), tree=True)


def test_examples_in_docstrings() -> None:
    for module in (base, registry, selection, siblings, traversal):
        names = {"Tree": siblings.Tree, "torch": torch}
        assert doctest.testmod(module, extraglobs=names).failed == 0
