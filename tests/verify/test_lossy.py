"""Lossy rules do what their papers say, and are exact where their knob is at its exact end."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace import LLM, SamplingParams
from outpace.audit.gate.drafting import BUILT_IN, iid
from outpace.audit.gate.enumeration import audit_distributions, measure
from outpace.audit.gate.gate_trees import FAST, GateTree
from outpace.audit.gate.world import World
from outpace.core.proposal import Deterministic, Proposal, Sampled
from outpace.core.trees.tree import Tree
from outpace.errors import ConfigError
from outpace.heads.classifiers import JudgeHead
from outpace.verify.base import Evidence, Rule
from outpace.verify.lossy import JudgeRule, confidence
from outpace.verify.mixtures import CascadeRule, ReflectiveRule
from outpace.verify.registry import make_rule, rules
from targets.families import CONTEXT, drafter, plain, target
from targets.generating import greedy, ids

LOSSY = [name for name, rule in rules().items() if not rule.lossless]


def chain(tokens: list[int], q: Tensor | None = None) -> Proposal:
    """One row; q: ``[N, V]``, or none for deterministic tokens."""
    distribution = Deterministic() if q is None else Sampled(q[None])
    size = len(tokens)
    return Proposal(torch.tensor([tokens]), Tree.chain(1, size), torch.tensor([size]), distribution)


def stops(rule: Rule, p: list[list[float]], proposal: Proposal) -> list[float]:
    found: list[float] = rule.stop(torch.tensor([p]).double(), proposal)[0].tolist()
    return found


@pytest.mark.parametrize("name", LOSSY)
def test_every_lossy_rule_still_emits_a_distribution_and_not_the_targets(name: str) -> None:
    report = audit_distributions([name], shapes=FAST[:3], pairs=10)
    assert report.passed, report.failures
    assert max(row.worst_tv for row in report.rows) > 1e-3


@pytest.mark.parametrize(
    "rule",
    [
        make_rule("lenient", lenience=1),
        make_rule("ears", tolerance=0),
        make_rule("reflective", weight=0),
        make_rule("judge", head=JudgeHead(torch.ones(4)), threshold=1),
    ],
    ids=lambda rule: rule.name,
)
def test_at_the_exact_end_of_its_knob_it_is_the_token_rule(rule: Rule) -> None:
    report = audit_distributions([rule], shapes=FAST[:3], pairs=10, seed=1)
    assert max(row.worst_tv for row in report.rows) < 1e-12


@pytest.mark.parametrize(
    "verify",
    [
        {"name": "lenient", "lenience": 1.0},
        {"name": "ears", "tolerance": 0.0},
        {"name": "judge", "threshold": 1.0, "head": JudgeHead(torch.zeros(32).double())},
    ],
    ids=lambda verify: verify["name"],
)
def test_so_it_is_where_target_and_drafter_are_cut_at_other_tokens(verify: dict[str, Any]) -> None:
    """The same draws decide in both, so that the texts are the same."""
    params = [
        SamplingParams(temperature=1.0, top_k=3, seed=seed, max_tokens=24, ignore_eos=True)
        for seed in range(8)
    ]

    def texts(rule: Any) -> list[list[int]]:
        config = {"model": drafter("llama", 0.6), "num_speculative_tokens": 4, "verify": rule}
        llm = LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT)
        return ids(llm.generate([[5, 6, 7]] * len(params), params))

    assert texts(verify) == texts("token")


@pytest.mark.parametrize("name", ["lenient", "ears", "typical", "joint", "bild", "confidence"])
def test_greedy_targets_stay_exact(name: str) -> None:
    report = greedy_report(make_rule(name))
    assert report < 1e-12


@pytest.mark.parametrize("defer", ["chow", "diff", "opt", "token"])
def test_a_greedy_text_under_cascade_does_not_depend_on_the_rows_beside_it(defer: str) -> None:
    """Alone its draft is given. Beside a sampled row it is drawn, from a distribution that is
    certain."""
    config = {
        "model": drafter("llama", 0.3),
        "num_speculative_tokens": 4,
        "verify": {"name": "cascade", "defer": defer, "alpha": 0.5},
    }
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=2, max_model_len=CONTEXT)
    sampled = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13]]
    expected = plain("llama", 24, (tuple(prompts[0]),))
    assert ids(llm.generate(prompts[:1], greedy(24))) == expected
    assert ids(llm.generate(prompts, [greedy(24), sampled]))[:1] == expected


def greedy_report(rule: Rule) -> float:
    torch.manual_seed(0)
    p = torch.nn.functional.one_hot(torch.randint(4, (12, 21)), 4).double()
    q = torch.rand(12, 21, 4).double().softmax(-1)
    nothing = torch.zeros(12, 21, 4)
    world = World(p, q, p, nothing, nothing, depth=2)
    shape = GateTree("chain 2", (0, 1), 4)
    drafts = [BUILT_IN[way](world, [0, 1]) for way in ("iid", "point")]
    return max(float(measure(rule, world, draft, shape).distance.max()) for draft in drafts)


# -- figures: mean total variation and acceptance of one step, V = 4; the token rule has .753 -----


def one_step_world(pairs: int = 400) -> World:
    torch.manual_seed(1)
    dirichlet = torch.distributions.Dirichlet(torch.full((4,), 0.7, dtype=torch.float64))
    p = dirichlet.sample((pairs, 5))
    nothing = torch.zeros(pairs, 5, 1)
    return World(p, (p + dirichlet.sample((pairs, 5))) / 2, p, nothing, nothing, depth=1)


@pytest.mark.parametrize(
    ("rule", "distance", "acceptance"),
    [
        (make_rule("token"), 0.0, 0.753),
        (make_rule("ears", tolerance=0.1), 0.022, 0.776),
        (make_rule("ears", tolerance=0.3), 0.063, 0.816),
        (make_rule("lenient", lenience=0.8), 0.057, 0.807),
        (make_rule("lenient", lenience=0.5), 0.125, 0.875),
        (make_rule("typical"), 0.148, 0.822),
        (make_rule("typical", posterior_threshold=0.3, posterior_alpha=0.09), 0.179, 0.903),
    ],
    ids=str,
)
def test_knobs_cost_what_they_were_measured_to_cost(
    rule: Rule, distance: float, acceptance: float
) -> None:
    world = one_step_world()
    found = measure(rule, world, iid(world, [0]), GateTree("chain 1", (0,), 4))
    assert float(found.distance[-1].mean()) == pytest.approx(distance, abs=0.03)
    assert float(found.one_step[-1].mean()) == pytest.approx(acceptance, abs=0.03)


def test_lenience_never_raises_a_token_above_p_over_lenience() -> None:
    world, rule = one_step_world(50), make_rule("lenient", lenience=0.5)
    drafts, p = iid(world, [0]), world.p[:, 0]
    tree, tokens = Tree.chain(4, 1), torch.arange(4)[:, None]
    for pair in range(world.pairs):
        q = world.q[pair, :1].expand(4, 1, 4)
        proposal = Proposal(tokens, tree, torch.ones(4).long(), Sampled(q))
        probs = p[pair].expand(4, 2, 4)
        stop = rule.stop(probs, proposal)  # [4, 2]
        refused = rule.next(probs, proposal, torch.zeros(4).long())
        emitted = drafts.chance[pair] * stop[:, 1] + (drafts.chance[pair] * stop[:, 0]) @ refused
        assert (emitted <= p[pair] / 0.5 + 1e-12).all()


# -- one by one ----------------------------------------------------------------------------------


def test_typical_takes_the_deepest_path_and_the_likelier_of_two() -> None:
    p = torch.tensor(
        [[0.5, 0.4, 0.1], [0.1, 0.1, 0.8], [0.05, 0.9, 0.05], [1 / 3] * 3, [1 / 3] * 3]
    )
    tokens = torch.tensor([[0, 1, 2, 1]])  # two paths of two tokens: 0, 2 and 1, 1
    proposal = Proposal(tokens, Tree.uniform([0, 0, 1, 2], 1), torch.tensor([4]), Deterministic())
    assert make_rule("typical").stop(p[None], proposal)[0].tolist() == [0, 0, 0, 1, 0]  # .40 > .36
    ragged = Proposal(tokens, proposal.tree, torch.tensor([2]), Deterministic())
    assert make_rule("typical").stop(p[None], ragged)[0].tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("name", sorted(rules()))
def test_only_rules_that_say_so_look_at_later_tokens(name: str) -> None:
    """Whether the chances to stop at a draft's first nodes are the same where it ends earlier."""
    options = {"head": JudgeHead(torch.randn(4))} if name == "judge" else {}
    rule, alike = make_rule(name, **options), True
    for _ in range(100):
        p, q, after_two, after_three = torch.randn(4, 1, 4, 5).double().mul(2).softmax(-1)
        states, tokens = torch.randn(1, 4, 4), torch.randint(5, (3,)).tolist()
        found = []
        for nodes, second in ((2, after_two), (3, after_three)):  # a second pass reads all of them
            of, draft = slice(nodes + 1), q[:, :nodes]
            evidence = Evidence(states[:, of], second[:, of], p[:, of], draft)
            informed = rule.with_evidence(evidence)
            found.append(informed.stop(p[:, of], chain(tokens[:nodes], draft[0]))[0, :2])
        alike &= torch.allclose(*found, atol=1e-12)
    assert alike != rule.looks_ahead


def test_joint_looks_past_a_failure() -> None:
    p = [[0.2, 0.8], [0.9, 0.1], [0.5, 0.5]]
    q = torch.tensor([[0.5, 0.5], [0.4, 0.6]])  # ratios .4 and 2.25: .4 fails, .9 passes
    assert stops(make_rule("joint"), p, chain([0, 0], q)) == [0, 0, 1]
    assert stops(make_rule("joint", threshold=0.95), p, chain([0, 0], q)) == [1, 0, 0]


def test_joint_uses_the_drafters_distribution_of_points_when_it_has_it() -> None:
    p = [[0.2, 0.8], [0.5, 0.5]]
    draft = torch.tensor([[[0.3, 0.7]]])
    assert stops(make_rule("joint"), p, chain([0])) == [1, 0]
    assert stops(make_rule("joint").with_evidence(Evidence(draft_probs=draft)), p, chain([0])) == [
        0,
        1,
    ]


def test_bild_rolls_back_only_what_surprises_and_never_the_argmax() -> None:
    p = [[0.1, 0.5, 0.4], [0.004, 0.3, 0.696], [0.2, 0.2, 0.6]]
    assert stops(make_rule("bild"), p, chain([0, 0])) == [0, 1, 0]  # -log .004 = 5.5
    assert stops(make_rule("bild", rollback=6), p, chain([0, 0])) == [0, 0, 1]
    assert stops(make_rule("bild", rollback=0), p, chain([1, 2])) == [0, 0, 1]
    assert stops(make_rule("bild", rollback=0), p, chain([1, 1])) == [0, 1, 0]


def test_bild_of_a_greedy_row_looks_at_the_distribution_before_the_argmax() -> None:
    softmax_probs = torch.tensor([[[0.1, 0.5, 0.4], [0.2, 0.2, 0.6]]])
    greedy = [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    assert stops(make_rule("bild"), greedy, chain([0])) == [1, 0]
    assert stops(
        make_rule("bild").with_evidence(Evidence(softmax_probs=softmax_probs)), greedy, chain([0])
    ) == [0, 1]


def test_bild_stops_the_drafter_when_it_is_unsure() -> None:
    q = torch.tensor([[0.7, 0.3], [0.5, 0.5]])
    assert make_rule("bild").continue_on_probs(q).tolist() == [True, False]  # type: ignore[attr-defined]


def test_confidence_is_one_for_sure_drafters_and_none_for_clueless_ones() -> None:
    assert confidence(torch.tensor([1.0, 0.0, 0.0])).item() == pytest.approx(1)
    assert confidence(torch.full((4,), 0.25)).item() == pytest.approx(0.25 / 3)
    p = [[0.2, 0.8], [0.5, 0.5]]
    sure, unsure = torch.tensor([[0.99, 0.01]]), torch.tensor([[0.5, 0.5]])
    assert stops(make_rule("confidence"), p, chain([0], sure)) == [0, 1]
    assert stops(make_rule("confidence"), p, chain([0], unsure)) == [1, 0]


def test_lud_asks_the_drafter_only_and_the_eldest_child_only() -> None:
    p = [[0.0, 1.0], [0.0, 1.0], [0.5, 0.5]]
    sure, unsure = [0.95, 0.05], [0.6, 0.4]
    rule = make_rule("lud")
    assert stops(rule, p, chain([0, 0], torch.tensor([sure, sure]))) == [0, 0, 1]
    assert stops(rule, p, chain([0, 0], torch.tensor([sure, unsure]))) == [0, 1, 0]
    assert stops(rule, p, chain([0, 0], torch.tensor([unsure, sure]))) == [1, 0, 0]
    siblings = Proposal(
        torch.tensor([[0, 1, 1]]),
        Tree.uniform([0, 0, 1], 1),
        torch.tensor([3]),
        Sampled(torch.tensor([[sure, sure, unsure]]), with_replacement=False),
    )
    assert stops(rule, [*p, [0.5, 0.5]], siblings) == [0, 1, 0, 0]


def test_lud_of_a_greedy_row_looks_at_the_drafters_distribution_before_the_argmax() -> None:
    p, draft = [[0.0, 1.0], [0.5, 0.5]], torch.tensor([[[0.95, 0.05]]])
    assert stops(make_rule("lud").with_evidence(Evidence(draft_probs=draft)), p, chain([0])) == [
        0,
        1,
    ]
    with pytest.raises(ConfigError, match="does not say it of greedy texts"):
        stops(make_rule("lud"), p, chain([0]))


def test_lud_samples_from_q_where_it_is_sure_and_from_p_elsewhere() -> None:
    world = one_step_world(60)
    found = measure(
        make_rule("lud", threshold=0.6), world, iid(world, [0]), GateTree("chain 1", (0,), 4)
    )
    p, q = world.p[:, 0], world.q[:, 0]
    far = torch.where(q.amax(-1) >= 0.6, (p - q).abs().sum(-1) / 2, 0.0)
    assert 0 < int((far > 0).sum()) < 60
    assert torch.allclose(found.distance[-1, 0], far, atol=1e-12)


def test_a_judge_overrules_the_ratio() -> None:
    truth = torch.tensor([2.0, -1.0, 0.5, 0.0])
    head = JudgeHead(truth, bias=-1.0)
    evidence = Evidence(hidden_states=torch.stack([truth, truth, -truth])[None])
    rule = JudgeRule(head=head).with_evidence(evidence)
    p = [[0.1, 0.9]] * 3
    assert stops(rule, p, chain([0, 0])) == pytest.approx([0, 0.9, 0.1])


def test_a_judge_is_kept_in_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "head.pt")
    JudgeHead(torch.tensor([1.0, 2.0]), 0.5).save(path)
    rule = make_rule("judge", head=path)
    assert isinstance(rule, JudgeRule)
    assert isinstance(rule.head, JudgeHead)
    assert rule.head.weight.tolist() == [1, 2]
    for wrong in (str(tmp_path / "none.pt"), __file__):
        with pytest.raises(ConfigError, match="no judge head"):
            make_rule("judge", head=wrong)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04, and no archive behind it",
        {"weight": [1.0, 2.0], "bias": 0.0},
        {"weight": torch.ones(1, 2), "bias": 0.0},
        {"weight": torch.ones(2), "bias": "much"},
        torch.ones(3),
    ],
    ids=["empty", "cut off", "no tensor", "two dimensions", "no number", "a tensor alone"],
)
def test_what_is_no_judge_is_refused_in_a_sentence(content: object, tmp_path: Path) -> None:
    path = tmp_path / "head.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ConfigError, match="no judge head"):
        make_rule("judge", head=path)


def test_a_judge_of_other_hidden_states_is_refused_in_a_sentence() -> None:
    evidence = Evidence(hidden_states=torch.zeros(1, 2, 4))
    rule = JudgeRule(head=JudgeHead(torch.ones(3))).with_evidence(evidence)
    with pytest.raises(ConfigError, match="states of 3 numbers, and those of this target have 4"):
        stops(rule, [[0.5, 0.5]] * 2, chain([0]))


def test_a_rule_without_its_evidence_says_so() -> None:
    with pytest.raises(ConfigError, match="states"):
        stops(JudgeRule(head=JudgeHead(torch.ones(2))), [[0.5, 0.5]] * 2, chain([0]))
    with pytest.raises(ConfigError, match="second"):
        stops(make_rule("reflective"), [[0.5, 0.5]] * 2, chain([0]))


def test_reflection_fuses_logits_and_keeps_greedy_rows_greedy() -> None:
    softmax_probs = torch.tensor([[[0.6, 0.4]]]).double()
    second = torch.tensor([[[0.1, 0.9]]]).double()
    rule = ReflectiveRule(weight=0.5)
    fused = rule.fused(softmax_probs, second, softmax_probs)[0, 0]
    odds = math.sqrt(0.6 * 0.1) / math.sqrt(0.4 * 0.9)
    assert (fused[0] / fused[1]).item() == pytest.approx(odds)
    assert rule.fused(torch.tensor([[[1.0, 0.0]]]), second, softmax_probs)[0, 0].tolist() == [0, 1]


@pytest.mark.parametrize("defer", ["chow", "diff", "opt", "token"])
def test_cascades_sample_exactly_from_their_mixture(defer: str) -> None:
    torch.manual_seed(0)
    p, q = torch.rand(30, 4).double().softmax(-1), (3 * torch.rand(30, 4).double()).softmax(-1)
    rule = CascadeRule(defer=defer, alpha=0.3)
    probs, mixture = torch.stack([p, p], 1), rule.mixture(p, q)
    emitted = torch.zeros_like(p)
    for token in range(4):
        tokens = torch.full((30, 1), token)
        proposal = Proposal(tokens, Tree.chain(30, 1), torch.ones(30).long(), Sampled(q[:, None]))
        stop, refused = rule.stop(probs, proposal), rule.next(probs, proposal, tokens[:, 0] * 0)
        emitted[:, token] += q[:, token] * stop[:, 1]
        emitted += (q[:, token] * stop[:, 0])[:, None] * refused
    assert torch.allclose(emitted, mixture, atol=1e-12)
    assert torch.allclose(mixture.sum(-1), torch.ones(30).double())
    assert not torch.allclose(mixture, p)
