"""The gate lets exact rules pass and catches every known defect."""

import io
import json

import pytest
import torch
from rich.console import Console

from outpace.audit.gate.drafting import BUILT_IN, ENDING
from outpace.audit.gate.enumeration import audit_distributions
from outpace.audit.gate.gate_trees import FAST
from outpace.audit.gate.world import KINDS, make_world, with_small_numbers
from outpace.audit.report import distribution_findings
from outpace.core.proposal import Proposal
from outpace.errors import ConfigError, IncompatibleRule
from outpace.verify.lossless import block
from outpace.verify.lossless.token import TokenRule
from outpace.verify.registry import rules

from .defects import DEFECTS, TOKEN, Defect, ForgetfulBelow, Siblings, iid_as_if_without

LOSSLESS = [name for name, rule in rules().items() if rule.lossless]


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_defect_is_caught(defect: Defect, seed: int) -> None:
    report = audit_distributions(
        [defect.rule], {"defect": defect.drafting}, shapes=defect.shapes, pairs=10, seed=seed
    )
    assert not report.passed
    assert report.failures[0].worst_tv > 1e-7


@pytest.mark.parametrize("drafted", ["point", "iid"])
def test_the_gate_as_it_runs_catches_a_mistake_that_begins_below_depth_3(drafted: str) -> None:
    report = audit_distributions([ForgetfulBelow(TOKEN)], [drafted])
    assert [row.shape for row in report.failures] == ["chain 6"]


def test_deep_trees_are_enumerated_with_few_pairs_of_models() -> None:
    deep = [shape for shape in FAST if shape.most_pairs]
    pairs = {
        row.pairs for row in audit_distributions(["token"], ["iid"], shapes=[*deep, FAST[0]]).rows
    }
    assert pairs == {5, 10}
    assert {
        row.pairs for row in audit_distributions(["token"], ["iid"], shapes=deep, pairs=2).rows
    } == {2}


def test_the_written_out_siblings_are_exact_without_a_defect() -> None:
    """So that it is the defect that is caught."""
    siblings = [shape for shape in FAST if set(shape.parents) == {0}]
    report = audit_distributions([Siblings()], ["without"], shapes=siblings, pairs=10)
    assert report.passed, report.failures


def test_our_own_rule_passes_over_siblings_that_cannot_have_been_drawn() -> None:
    """Which makes repeated siblings harmless: independent draws, taken for distinct ones."""
    siblings = [shape for shape in FAST if set(shape.parents) == {0}]
    for rule in ("recursive", "traversal"):
        assert audit_distributions(
            [rule], {"repeated": iid_as_if_without}, shapes=siblings, pairs=10
        ).passed


def test_clean_runs_raise_no_alarm() -> None:
    cheap = [name for name in LOSSLESS if name != "canonical"]
    for seed in range(30):  # a hundred of everything are slow: see the next one
        way, shape = ("iid", "without", "point")[seed % 3], (FAST[1], FAST[3])[seed % 2]
        report = audit_distributions(cheap, [way], shapes=[shape], pairs=10, seed=seed)
        assert report.passed, report.failures


@pytest.mark.slow
def test_a_hundred_clean_runs_of_everything() -> None:
    for seed in range(100):
        assert audit_distributions(LOSSLESS, shapes=FAST[1:5], seed=seed, pairs=4).passed


def test_the_report_is_json_and_says_what_was_seen() -> None:
    report = audit_distributions(["token", "lenient"], ["iid"], shapes=FAST[:2], pairs=4)
    found = json.loads(json.dumps(report.as_dict()))
    assert found["passed"] is True
    assert [row["rule"] for row in found["rows"]] == ["token"] * 2 + ["lenient"] * 2
    token, lenient = report.rows[0], report.rows[2]
    assert token.worst_tv <= 1e-12 < lenient.worst_tv
    assert token.gap == pytest.approx(0, abs=1e-12)
    assert lenient.gap < 0
    assert lenient.accepted == lenient.one_step > token.one_step


def test_a_lossy_rule_that_calls_itself_lossless_fails() -> None:
    class Bold(TokenRule):
        name = "bold"

        def stop(self, p: torch.Tensor, proposal: object) -> torch.Tensor:
            stop = super().stop(p, proposal)  # type: ignore[arg-type]
            return torch.cat([stop[:, :1] / 2, stop[:, 1:] + stop[:, :1] / 2], 1)

    assert not audit_distributions([Bold()], ["iid"], shapes=FAST[:1], pairs=10).passed


def test_what_is_lost_in_rounding_shows_with_small_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Block verification divided by S + 1 - a, which is 0 where a is 1 and S below 1e-16."""

    def careless(p: torch.Tensor, q: torch.Tensor, joint: torch.Tensor) -> torch.Tensor:
        left = block.excess(p, q, 1 / joint.clamp(min=block.TINY)).sum(-1) * joint
        passed = block.quotient(left, left + 1 - joint)
        return torch.where((left <= 0) & (joint >= 1), 1.0, passed)

    assert audit_distributions(["block"], ["iid"], shapes=FAST[1:3]).passed
    monkeypatch.setattr(block, "_pass", careless)
    assert not audit_distributions(["block"], ["iid"], shapes=FAST[1:3]).passed


def test_nan_fails() -> None:
    class Undefined(TokenRule):
        name = "undefined"
        lossless = False

        def next(self, p: torch.Tensor, *_: object) -> torch.Tensor:
            return p[:, 0] * float("nan")

    assert not audit_distributions([Undefined()], ["iid"], shapes=FAST[:1], pairs=3).passed


@pytest.mark.parametrize("function", ["stop", "next"])
def test_what_has_not_the_shape_of_a_distribution_fails_by_its_name(function: str) -> None:
    class Narrow(TokenRule):
        name = "narrow"

        def stop(self, p: torch.Tensor, proposal: Proposal) -> torch.Tensor:
            found = super().stop(p, proposal)
            return found[:, :-1] if function == "stop" else found

        def next(self, p: torch.Tensor, proposal: Proposal, node: torch.Tensor) -> torch.Tensor:
            found = super().next(p, proposal, node)
            return found[:, :-1] if function == "next" else found

    report = audit_distributions([Narrow()], ["iid", "stopping"], shapes=FAST[1:2], pairs=3)
    assert [row.passed for row in report.rows] == [False, False]
    assert all(row.fault.startswith(f"`{function}` returns the shape [") for row in report.rows)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(distribution_findings(report))
    assert f"narrow: `{function}` returns the shape" in console.export_text()


def test_what_cannot_be_audited_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'iid'"):
        audit_distributions(["token"], ["idd"])
    with pytest.raises(ConfigError, match="did you mean 'token'"):
        audit_distributions(["tokn"])
    with pytest.raises(ConfigError, match=r"Siblings is a class.* such as Siblings\(\)"):
        audit_distributions([Siblings])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="an object of one, not 3"):
        audit_distributions([3])  # type: ignore[list-item]
    with pytest.raises(IncompatibleRule, match="without replacement"):
        audit_distributions(["kseq"], ["without"], shapes=FAST[:1])


def test_a_stop_head_ends_chains_of_every_length() -> None:
    world = make_world(2 * len(KINDS), 3, 3, seed=0)
    counts = BUILT_IN["doubting"](world, [0, 1, 2]).counts
    assert counts is not None
    assert sorted(set(counts.flatten().tolist())) == [1, 2, 3]  # it is asked after a token


@pytest.mark.parametrize("drafted", [name for name in BUILT_IN if name != "point"])
def test_drafts_are_distributions(drafted: str) -> None:
    world = make_world(2 * len(KINDS), 3, 2, seed=0)
    way = BUILT_IN[drafted]
    drafts = way(world, [0, 1] if way in ENDING else [0, 0, 1])
    assert torch.allclose(drafts.chance.sum(-1), torch.ones(world.pairs).double())
    assert (drafts.chance >= 0).all()


def test_worlds_hold_the_hard_cases() -> None:
    world = make_world(2 * len(KINDS), 4, 1, seed=0)
    for distribution in (world.p, world.q, world.second):
        assert torch.allclose(distribution.sum(-1), torch.ones(1).double())
    p, q = world.p, world.q
    assert (p == q).all(-1).any()
    assert ((p * q).sum(-1) == 0).any()
    assert (p.amax(-1) == 1).any()
    assert (q == 0).any()
    assert ((p[..., :, None] == p[..., None, :]).sum((-1, -2)) > 4).any()
    again = make_world(2 * len(KINDS), 4, 1, seed=0)
    assert again.p.equal(p)
    assert not make_world(2 * len(KINDS), 4, 1, seed=1).p.equal(p)


def test_small_numbers_are_distributions_as_small_as_float32_has_them() -> None:
    world = with_small_numbers(make_world(20, 4, 1, seed=0), seed=0)
    for distribution in (world.p, world.q):
        assert torch.allclose(distribution.sum(-1), torch.ones(1).double())
        assert (distribution[distribution > 0] < 1e-40).any()
    assert (world.p == world.q).all(-1).any()


def test_what_was_not_enumerated_has_not_passed() -> None:
    lone = [shape for shape in FAST if shape.name == "chain 1"]
    for rules_asked, drafters, shapes in (
        ([], None, None),
        (["token"], {}, None),
        (["token"], ["stopping"], lone),  # which needs a chain of two
    ):
        with pytest.raises(ConfigError, match="nothing to enumerate"):
            audit_distributions(rules_asked, drafters, shapes=shapes)
