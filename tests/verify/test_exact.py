"""Every lossless rule emits the target's distribution, and some are never worse than others."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outpace.audit.gate.drafting import BUILT_IN, iid
from outpace.audit.gate.enumeration import audit_distributions, measure
from outpace.audit.gate.gate_trees import FAST, FULL, GateTree
from outpace.audit.gate.oracle import best_acceptance, best_of_several
from outpace.audit.gate.world import World, make_world, with_small_numbers
from outpace.core.proposal import Deterministic, DraftSampling, Proposal, Sampled
from outpace.core.trees.tree import Tree
from outpace.verify.base import Rule
from outpace.verify.registry import make_rule, rules
from representatives import representatives

NAMES = {
    DraftSampling.DETERMINISTIC: "point",
    DraftSampling.IID: "iid",
    DraftSampling.WITHOUT_REPLACEMENT: "without",
    DraftSampling.PER_DRAFTER: "several",
}
LOSSLESS = [name for name, rule in rules().items() if rule.lossless]
QUICK = [shape for shape in FAST if len(shape.parents) < 4]


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_joint_distribution_is_the_targets(name: str) -> None:
    report = audit_distributions([name], shapes=QUICK, pairs=5, seed=1)
    assert report.passed, report.failures
    assert {row.drafted for row in report.rows} - {"stopping", "unsure", "doubting"} == {
        NAMES[drawn] for drawn in rules()[name].takes
    }


@pytest.mark.parametrize("shape", [FAST[2], FAST[4], FAST[5]], ids=lambda s: s.name)
def test_the_joint_distribution_is_the_targets_however_small_probabilities_are(
    shape: GateTree,
) -> None:
    for seed in range(4):
        base = make_world(10, shape.vocabulary, shape.depth, seed)
        world = with_small_numbers(base, seed)
        drafts = BUILT_IN["iid"](world, list(shape.parents))
        for name in LOSSLESS:
            rule = make_rule(name)
            if DraftSampling.IID in rule.takes and (rule.trees or shape.is_chain):
                found = measure(rule, world, drafts, shape)
                assert float(found.distance.max()) < 1e-12, (name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSLESS)
def test_the_whole_matrix(name: str) -> None:
    report = audit_distributions([name], fast=False, seed=1)
    assert report.passed, report.failures


@pytest.mark.parametrize("alphabet", [0, 1, 2, 3])
def test_canonical_is_exact_however_short_the_alphabet(alphabet: int) -> None:
    rule = make_rule("canonical", alphabet=alphabet)
    siblings = [shape for shape in QUICK if not shape.is_chain]
    report = audit_distributions([rule], ["iid"], shapes=siblings, pairs=6, seed=2)
    assert report.passed, report.failures


def pair_of(
    better: str, worse: str, shape: GateTree, drafted: str, seed: int
) -> tuple[Tensor, Tensor]:
    world = make_world(12, shape.vocabulary, shape.depth, seed)
    drafts = BUILT_IN[drafted](world, list(shape.parents))
    first, second = (measure(make_rule(name), world, drafts, shape) for name in (better, worse))
    return first.accepted, second.accepted


@pytest.mark.parametrize("shape", [s for s in FULL if s.is_chain], ids=lambda s: s.name)
def test_block_never_accepts_less_than_token(shape: GateTree) -> None:
    block, token = pair_of("block", "token", shape, "iid", seed=3)
    assert (block >= token - 1e-12).all()
    assert shape.depth == 1 or (block > token + 1e-3).any()


@pytest.mark.parametrize("drafted", ["iid", "without"])
@pytest.mark.parametrize("shape", [*QUICK, FAST[-1]], ids=lambda s: s.name)
def test_traversal_never_accepts_less_than_recursive(shape: GateTree, drafted: str) -> None:
    traversal, recursive = pair_of("traversal", "recursive", shape, drafted, seed=4)
    assert (traversal >= recursive - 1e-12).all()


@pytest.mark.slow
@pytest.mark.parametrize("drafted", ["iid", "without"])
@pytest.mark.parametrize("shape", FULL, ids=lambda s: s.name)
def test_traversal_against_recursive_everywhere(shape: GateTree, drafted: str) -> None:
    traversal, recursive = pair_of("traversal", "recursive", shape, drafted, seed=5)
    assert (traversal >= recursive - 1e-12).all()


@pytest.mark.parametrize("name", ["block", "recursive", "traversal", "kseq", "canonical"])
def test_one_token_is_the_token_rule(name: str) -> None:
    this, token = pair_of(name, "token", FAST[0], "iid", seed=6)
    assert torch.allclose(this, token, atol=1e-12)


@pytest.mark.parametrize("name", ["recursive", "kseq", "canonical"])
def test_on_a_chain_it_is_the_token_rule(name: str) -> None:
    this, token = pair_of(name, "token", FAST[2], "iid", seed=6)
    assert torch.allclose(this, token, atol=1e-12)


@pytest.mark.parametrize("shape", [*QUICK, FAST[-1]], ids=lambda s: s.name)
def test_several_distributions_that_are_the_same_are_one(shape: GateTree) -> None:
    world = make_world(12, shape.vocabulary, shape.depth, seed=8)
    drafts = iid(world, list(shape.parents))
    assert isinstance(drafts.distribution, Sampled)
    each = replace(drafts, distribution=replace(drafts.distribution, per_drafter=True))
    one, several = (measure(make_rule("recursive"), world, d, shape) for d in (drafts, each))
    for name in ("accepted", "one_step"):
        assert torch.allclose(getattr(one, name), getattr(several, name), atol=1e-12)
    assert float(several.distance.max()) < 1e-12


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_the_optimum_of_several_distributions_that_are_the_same_is_that_of_one(drafts: int) -> None:
    world = make_world(40, 4, 1, seed=9)
    p, q = world.p[:, 0], world.q[:, 0]
    one, several = best_acceptance(p, q, drafts), best_of_several(p, torch.stack([q] * drafts))
    assert torch.allclose(one, several, atol=1e-12)


def test_no_exact_rule_accepts_more_of_several_distributions_than_the_optimum() -> None:
    (row,) = audit_distributions(
        ["recursive"], ["several"], shapes=[FAST[3]], pairs=20, seed=3
    ).rows
    assert row.optimum - 0.1 < row.one_step < row.optimum


# -- one step: the figures of the literature -----------------------------------------------------


def one_step_world(pairs: int = 200, vocabulary: int = 5) -> World:
    """Half of q is p and half another random distribution: drafters that agree with their target
    often."""
    torch.manual_seed(0)
    dirichlet = torch.distributions.Dirichlet(torch.full((vocabulary,), 0.7, dtype=torch.float64))
    p = dirichlet.sample((pairs, vocabulary + 1))
    q = (p + dirichlet.sample((pairs, vocabulary + 1))) / 2
    nothing = torch.zeros(*p.shape[:2], 1)
    return World(p, q, p, nothing, nothing, depth=1)


def one_step(rule: Rule, world: World, drafts: int, drafted: str) -> tuple[float, float]:
    shape = GateTree("siblings", (0,) * drafts, world.vocabulary)
    found = measure(rule, world, BUILT_IN[drafted](world, list(shape.parents)), shape)
    return float(found.one_step[-1].mean()), float(found.optimum.mean())


def test_mean_acceptance_of_two_drafts_is_that_of_the_literature() -> None:
    world = one_step_world()
    found = {
        (name, drafted): one_step(make_rule(name), world, 2, drafted)[0]
        for name, drafted in [
            ("match", "iid"),
            ("recursive", "iid"),
            ("kseq", "iid"),
            ("canonical", "iid"),
            ("recursive", "without"),
        ]
    }
    published = [0.476, 0.854, 0.878, 0.942, 0.898]
    for value, reference in zip(found.values(), published, strict=True):
        assert value == pytest.approx(reference, abs=0.025)
    assert one_step(make_rule("token"), world, 1, "iid")[0] == pytest.approx(0.733, abs=0.025)
    best_iid = one_step(make_rule("match"), world, 2, "iid")[1]
    best_without = one_step(make_rule("match"), world, 2, "without")[1]
    assert best_iid == pytest.approx(0.942, abs=0.025)
    assert best_without == pytest.approx(0.987, abs=0.025)
    order = [found["match", "iid"], found["recursive", "iid"], found["kseq", "iid"]]
    order += [found["recursive", "without"], found["canonical", "iid"] + 1e-9, best_without]
    assert order == sorted(order)


def test_three_drafts_keep_the_order() -> None:
    world = one_step_world(pairs=20)
    names = ["match", "recursive", "kseq", "canonical"]
    values = [one_step(make_rule(name), world, 3, "iid") for name in names]
    acceptances = [value for value, _ in values]
    assert acceptances == sorted(acceptances)
    assert acceptances[-1] <= values[0][1] + 1e-12
    without, best = one_step(make_rule("recursive"), world, 3, "without")
    assert acceptances[1] < without < best


@pytest.mark.parametrize(
    ("drafts", "published"), representatives([(2, 0.659), (3, 0.828)], [(2, 0.659)])
)
def test_the_likeliest_drafts_told_as_points_lie_between(drafts: int, published: float) -> None:
    world = one_step_world()
    tokens = world.q[:, 0].topk(drafts, -1).indices
    tree = Tree.uniform([0] * drafts, world.pairs)
    counts = torch.full((world.pairs,), drafts)
    proposal = Proposal(tokens, tree, counts, Deterministic())
    p = world.p[:, :1].expand(-1, drafts + 1, -1)
    accepted = 1 - make_rule("recursive").stop(p, proposal)[:, 0].mean().item()
    assert accepted == pytest.approx(published, abs=0.025)
    low, high = (one_step(make_rule(name), world, drafts, "iid")[0] for name in ("match", "kseq"))
    assert low < accepted < high


def test_canonical_with_two_drafts_reaches_the_optimum_in_every_case() -> None:
    world, shape = one_step_world(), GateTree("siblings", (0, 0), 5)
    found = measure(make_rule("canonical"), world, iid(world, [0, 0]), shape)
    assert torch.allclose(found.one_step[-1], found.optimum, atol=1e-6)


@pytest.mark.parametrize("name", ["recursive", "kseq", "traversal", "canonical"])
@pytest.mark.parametrize("drafts", [2, 3])
def test_no_rule_beats_the_optimum(name: str, drafts: int) -> None:
    world, shape = make_world(20, 4, 1, seed=7), GateTree("siblings", (0,) * drafts, 4)
    for drafted in ("iid", "without") if name in ("recursive", "traversal") else ("iid",):
        found = measure(make_rule(name), world, BUILT_IN[drafted](world, [0] * drafts), shape)
        assert (found.one_step[-1] <= found.optimum + 1e-9).all()


def test_kseq_keeps_its_guarantee() -> None:
    world, shape = make_world(20, 4, 1, seed=8), GateTree("siblings", (0, 0, 0), 4)
    found = measure(make_rule("kseq"), world, iid(world, [0, 0, 0]), shape)
    assert (found.one_step[-1] >= (1 - 1 / math.e) * found.optimum - 1e-12).all()


def test_kseq_pools_chains_that_agree() -> None:
    """Two chains with the same first token offer two candidates for the second."""
    shape = GateTree("2 chains of 2", (0, 1, 0, 3))
    pooled, apart = pair_of("kseq", "recursive", shape, "iid", seed=9)
    assert (pooled[-1].mean() > apart[-1].mean()).item()
