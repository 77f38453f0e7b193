"""What a rule asks of the drafter: where chains end, and the distributions that greedy tokens were
taken from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from devices import on_device
from outpace import LLM, SamplingParams
from outpace.core.proposal import Deterministic, Proposal, Sampled
from outpace.draft.base import Rows
from outpace.engine.verifier import Verifier
from outpace.errors import IncompatibleRule
from outpace.heads.classifiers import JudgeHead
from outpace.verify.base import Evidence, RuleNeeds
from outpace.verify.lossless.coupled import CoupledRule
from outpace.verify.lossless.recursive import RecursiveRule
from outpace.verify.lossless.token import TokenRule
from targets.families import CONTEXT, PROMPTS, drafter, plain, target
from targets.generating import decoder, greedy, ids

LENGTH = 16
SURE = 0.055
"""About the median of max q: the distributions of random models are flat."""
SAMPLED = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=3)
EXACT = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))


def sure(q: Tensor) -> Tensor:
    return q.amax(-1) >= SURE


class Cautious(TokenRule):
    """The token rule for chains that end where the drafter is not sure."""

    name = "cautious"

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(continue_on_probs=sure)


class CautiousCoupled(CoupledRule):
    name = "cautious coupled"

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(continue_on_probs=sure)


class CautiousTree(RecursiveRule):
    name = "cautious tree"

    @property
    def needs(self) -> RuleNeeds:
        return RuleNeeds(continue_on_probs=sure)


def bild(**options: Any) -> LLM:
    return decoder("llama", "draft_model", 5, verify={"name": "bild", **options})


def recorded(llm: LLM) -> list[tuple[Rows, Proposal, int]]:
    """Each round's proposal with the rows it was made for and the passes it took."""
    drafting: Any = llm.engine.drafter
    propose, seen = drafting.propose, []

    def watched(rows: Rows, budgets: list[int]) -> Proposal:
        # The engine's lists grow; what the drafter saw must not.
        history = replace(rows.history, outputs=[list(out) for out in rows.history.outputs])
        before = drafting.runner.passes
        made = propose(rows, budgets)
        seen.append((replace(rows, history=history), made, drafting.runner.passes - before))
        return made

    drafting.propose = watched
    return seen


def soft_probs(text: list[int]) -> Tensor:
    """The drafter's distributions ``[T, V]`` after each token, from a pass without a cache."""
    with torch.no_grad():
        logits = drafter("llama")(on_device([text])).logits[0]
    return logits.softmax(-1)


def wanted(rows: Rows, made: Proposal, row: int) -> int:
    """How many tokens the policy lets stand in a row's chain, by plain passes of the drafter."""
    text = [*rows.history.prompts[row], *rows.history.outputs[row]]
    chain = made.tokens[row].tolist()
    probs = soft_probs([*text, *chain])[len(text) - 1 :]
    unsure = (~sure(probs)).nonzero()[:, 0].tolist()
    return min([len(chain), *unsure])


@pytest.mark.parametrize("options", [greedy(LENGTH), SAMPLED], ids=["greedy", "sampled"])
def test_bilds_fallback_ends_each_rows_chain_before_the_first_unsure_token(
    options: SamplingParams,
) -> None:
    llm = bild(fallback=SURE, rollback=3.0)
    seen = recorded(llm)
    llm.generate(PROMPTS, options)
    rounds = [(rows, made, passes) for rows, made, passes in seen if len(rows) == len(PROMPTS)]
    for rows, made, passes in rounds:
        counts = made.counts.tolist()
        left = [LENGTH - 1 - len(output) for output in rows.history.outputs]
        assert counts == [min(left[row], wanted(rows, made, row)) for row in range(len(rows))]
        width = made.tree.size
        assert width == max(counts)
        # One pass to catch up, then one for each token but a fifth: nobody drafts on in vain.
        # Prompts of unlike lengths take passes of their own in the first round.
        assert passes <= 1 + min(width, 4) or (rows, made, passes) is rounds[0]
    found = [made.counts.tolist() for _, made, _ in rounds]
    assert any(len(set(counts)) > 1 for counts in found), "some round should be ragged"
    assert any(0 in counts for counts in found), "some row should draft nothing"
    assert any(max(counts) < 5 for counts in found), "some round should end before its budget"


def test_where_nobody_is_sure_nothing_is_drafted_and_the_text_is_plain() -> None:
    llm = bild(fallback=1.0)
    seen = recorded(llm)
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == EXACT
    assert {made.tree.size for _, made, _ in seen} == {0}
    assert all(passes == 1 for _, _, passes in seen[1:])


@pytest.mark.parametrize("fallback", [0.0, SURE])
def test_greedy_bild_without_rollback_is_plain_greedy_decoding(fallback: float) -> None:
    outputs = bild(rollback=0, fallback=fallback).generate(PROMPTS, greedy(LENGTH))
    assert ids(outputs) == EXACT
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0


def test_greedy_bild_with_much_patience_is_not() -> None:
    """So that the test above shows something."""
    assert ids(bild(rollback=50, fallback=0).generate(PROMPTS, greedy(LENGTH))) != EXACT


@pytest.mark.parametrize("rule", ["bild", "joint", "confidence"])
def test_a_row_is_what_it_is_alone_in_a_batch_of_greedy_and_sampled_ones(rule: str) -> None:
    verify = {"name": rule, **({"fallback": SURE} if rule == "bild" else {})}
    llm = decoder("llama", "draft_model", 4, verify=verify)
    mixed = [SAMPLED, greedy(LENGTH), greedy(LENGTH), SAMPLED]
    together = llm.generate(PROMPTS, mixed)
    for row, prompt in enumerate(PROMPTS):
        alone = llm.generate([prompt], mixed[row])[0]
        assert alone.token_ids == together[row].token_ids
        assert alone.metrics.num_draft_tokens == together[row].metrics.num_draft_tokens


def test_the_coupled_text_does_not_depend_on_where_chains_end() -> None:
    llm = decoder("llama", "draft_model", 5, verify="coupled")
    long = llm.generate(PROMPTS, SAMPLED)
    llm.engine.verifier = Verifier(CautiousCoupled())
    short = llm.generate(PROMPTS, SAMPLED)
    assert ids(short) == ids(long)
    drafted = [sum(out.metrics.num_draft_tokens for out in outs) for outs in (short, long)]
    assert 0 < drafted[0] < drafted[1]


def test_an_exact_rule_with_a_policy_is_exact_when_greedy() -> None:
    llm = decoder("llama", "draft_model", 5)
    llm.engine.verifier = Verifier(Cautious())
    outputs = llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(outputs) == EXACT
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0


def test_a_policy_for_chains_refuses_trees() -> None:
    config = {"method": "draft_tree", "model": drafter("llama"), "verify": "recursive"}
    llm = LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT)
    with pytest.raises(IncompatibleRule, match=r"'cautious tree' decides where a chain .* ends"):
        CautiousTree().check(next(iter(llm.engine.drafter.sampling_kinds)), tree=True)


# -- distributions ---------------------------------------------------------------------------------


def evidence_of(llm: LLM, options: SamplingParams) -> list[tuple[Rows, Proposal, Evidence]]:
    """What the rule was given in each round in which something was drafted."""
    rule: Any = llm.engine.verifier.rule
    given: list[Evidence] = []

    def watched(evidence: Evidence) -> Any:
        given.append(evidence)
        return type(rule).with_evidence(rule, evidence)

    object.__setattr__(rule, "with_evidence", watched)
    seen = recorded(llm)
    llm.generate(PROMPTS, options)
    rounds = [(rows, made) for rows, made, _ in seen]
    return [
        (rows, made, evidence)
        for (rows, made), evidence in zip(rounds, given, strict=False)
        if made.tree.size
    ]


@pytest.mark.parametrize("rule", ["joint", "confidence"])
@pytest.mark.parametrize("options", [greedy(LENGTH), SAMPLED], ids=["greedy", "sampled"])
def test_the_drafters_distributions_reach_a_rule_that_asks(
    rule: str, options: SamplingParams
) -> None:
    found = evidence_of(decoder("llama", "draft_model", 3, verify=rule), options)
    assert found
    for rows, made, evidence in found:
        assert isinstance(made.distribution, Deterministic if options.temperature == 0 else Sampled)
        assert evidence.draft_probs is not None
        for row in range(len(rows)):
            text = [*rows.history.prompts[row], *rows.history.outputs[row]]
            count = int(made.counts[row])
            chain = made.tokens[row, :count].tolist()
            probs = soft_probs([*text, *chain])[len(text) - 1 :]
            assert torch.allclose(
                evidence.draft_probs[row, :count], probs[:count], atol=1e-12, rtol=0
            )
        if isinstance(made.distribution, Sampled):
            assert evidence.draft_probs.equal(made.distribution.q)


def test_joint_accepts_by_the_drafters_distributions_when_greedy() -> None:
    """Taking q = 1 for points it would accept next to nothing."""
    llm = decoder("llama", "draft_model", 3, verify="joint")
    told = llm.generate(PROMPTS, greedy(LENGTH))
    propose = llm.engine.drafter.propose
    llm.engine.drafter.propose = lambda *args: replace(propose(*args), draft_probs=None)  # type: ignore[method-assign]
    untold = llm.generate(PROMPTS, greedy(LENGTH))
    kept = [sum(out.metrics.num_accepted_tokens for out in outs) for outs in (told, untold)]
    assert kept[0] > kept[1]


def test_nobody_hands_over_distributions_that_nobody_asked_for() -> None:
    for rule in ("token", {"name": "bild", "fallback": SURE}):
        llm = decoder("llama", "draft_model", 3, verify=rule)
        seen = recorded(llm)
        llm.generate(PROMPTS, greedy(LENGTH))
        assert any(made.tree.size for _, made, _ in seen)
        assert all(made.draft_probs is None for _, made, _ in seen)


def test_look_up_has_no_distributions_and_no_doubts() -> None:
    joint = decoder("llama", "ngram", 3, verify="joint")
    probs: list[Any] = []
    rule: Any = joint.engine.verifier.rule
    object.__setattr__(
        rule,
        "with_evidence",
        lambda given: probs.append(given.draft_probs) or type(rule).with_evidence(rule, given),
    )
    joint.generate(PROMPTS, greedy(LENGTH))
    assert probs
    assert set(probs) == {None}
    drafted = [
        sum(out.metrics.num_draft_tokens for out in llm.generate(PROMPTS, greedy(LENGTH)))
        for llm in (
            decoder("llama", "ngram", 3, verify={"name": "bild", "rollback": 0, "fallback": fall})
            for fall in (0.0, 1.0)
        )
    ]
    assert drafted[0] == drafted[1] > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["ears", "judge", "bild", "confidence", "typical", "joint"])
def test_no_lossy_rule_accepts_a_token_that_a_request_forbids(
    rule: str, temperature: float
) -> None:
    """The drafts are copied from the prompt, half of whose tokens are forbidden."""
    width = target("llama").config.hidden_size
    options = {"judge": {"head": JudgeHead(torch.zeros(width).double()), "threshold": 0.1}}
    verify = {"name": rule, **options.get(rule, {})}
    llm = decoder("llama", "ngram", 3, verify=verify)
    allowed = [7, 9, 11]
    params = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=12, ignore_eos=True,
            allowed_token_ids=allowed,
        )
        for seed in range(6)
    ]  # fmt: skip
    outputs = llm.generate([[7, 8, 9, 7, 8, 9, 7, 11, 8, 9, 7]] * 6, params)
    assert sum(output.metrics.num_draft_tokens for output in outputs)
    for output in outputs:
        assert output.finish_reason == "length"
        assert set(output.token_ids) <= set(allowed)
