"""Drafters that need what no drafter of ours needs yet: each proves that a seam carries it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from audit_engine.pairs import PROMPTS as LETTERS_IN
from devices import on_device
from outpace import LLM, SamplingParams
from outpace.audit.gate.drafting import Drafts, iid
from outpace.audit.gate.enumeration import audit_distributions
from outpace.audit.gate.gate_trees import FAST
from outpace.audit.gate.world import World
from outpace.audit.letters import LetterTokenizer, letter_model
from outpace.audit.model import AuditPlan, audit_model
from outpace.core.logits.categorical import Categorical
from outpace.core.logits_pipeline import History, LogitsPipeline, RowOptions
from outpace.core.options import Options
from outpace.core.proposal import AuxTokens, Deterministic, DraftSampling, Needs, Proposal, Sampled
from outpace.core.request import Request
from outpace.core.rng import Role, uniform
from outpace.core.trees.tree import Tree
from outpace.draft.base import Drafter, Round, Rows, Setup
from outpace.draft.chains import deterministic_chains
from outpace.draft.registry import find_drafter
from outpace.draft.vocab_mapping import VocabMapping
from outpace.errors import ConfigError
from outpace.methods.models.noisy_copy import noisy_copy
from outpace.targets.base import Target
from targets.families import CONTEXT, PROMPTS, drafter, plain, target
from targets.generating import greedy, ids

from .registering import register

LENGTH = 16
EXPECTED = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))


def hidden(text: Sequence[int], layer: int) -> Tensor:
    """Returns the hidden states ``[T, H]`` of a text that is read plainly."""
    tokens = on_device([list(text)])
    output = target("llama")(input_ids=tokens, use_cache=False, output_hidden_states=True)
    return output.hidden_states[layer][0]


def decoder(config: dict[str, Any], **more: Any) -> LLM:
    options = {"max_num_seqs": 4, "max_model_len": CONTEXT, **more}
    return LLM(target("llama"), speculative_config=config, **options)


# -- states of every committed token, after the root too ------------------------------------------


class StatesDrafter(Drafter):
    """Proposes what the target's own head makes of the last state that there is: the last
    committed token once more, or what the target thought then."""

    name: ClassVar[str] = "states"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.DETERMINISTIC})
    needs: Needs = Needs(hidden_layers=(1, -1))
    trees: bool = True

    def __init__(self, decoder: Target) -> None:
        self.target = decoder
        self.ended: list[tuple[list[int], Tensor]] = []

    @classmethod
    def build(cls, setup: Setup) -> StatesDrafter:
        return cls(setup.target)

    def begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.state[self] = [], []

    def read(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], states: Tensor
    ) -> None:
        for place, request in enumerate(requests):
            text, seen = request.state[self]
            text += tokens[place]
            seen.append(states[place, : len(tokens[place])])

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        for request in requests:
            text, seen = request.state.pop(self)
            self.ended.append((text, torch.cat(seen)))

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        drafts = []
        for row, budget in enumerate(budgets):
            text, seen = rows.requests[row].state[self]
            states = [x for x in seen if len(x)]
            assert len(text) == rows.lengths[row] - 1 or not states
            size = states[-1].shape[-1] // 2 if states else 0
            guess = int(self.target.compute_logits(states[-1][-1, size:]).argmax()) if states else 0
            drafts.append([guess, (guess + 1) % 64][:budget])
        width = max(map(len, drafts))
        tokens = on_device([[*draft, *[0] * (width - len(draft))] for draft in drafts])
        counts = on_device([len(draft) for draft in drafts])
        tree = Tree.uniform([0] * width, len(drafts))
        return Proposal(tokens.view(len(drafts), width), tree, counts, Deterministic())


@pytest.mark.parametrize("budget", [3, 2048])
@pytest.mark.parametrize("speculative", ["off", 2])
def test_states_come_once_for_every_committed_token(
    monkeypatch: pytest.MonkeyPatch, budget: int, speculative: Any
) -> None:
    register(monkeypatch, StatesDrafter)
    llm = decoder(
        {"method": "states", "verify": "recursive", "num_speculative_tokens": 2},
        max_num_batched_tokens=budget,
    )
    params = replace(greedy(LENGTH), speculative=speculative)
    assert ids(llm.generate(PROMPTS, params)) == EXPECTED
    ended = llm.engine.drafter.ended
    assert len(ended) == len(PROMPTS)
    for text, states in ended:
        prompt = next(prompt for prompt in PROMPTS if text[: len(prompt)] == list(prompt))
        whole = [*prompt, *EXPECTED[PROMPTS.index(prompt)]]
        # What comes after the end of a text was accepted, and is nobody's any more.
        known = min(len(text), len(whole))
        assert text[:known] == whole[:known]
        assert known >= len(whole) - 1
        both = torch.cat([hidden(whole, 1), hidden(whole, -1)], -1)[:known]
        assert torch.allclose(states[:known], both, atol=1e-9)


def test_a_forked_prompt_is_read_again_where_its_states_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(monkeypatch, StatesDrafter)
    llm = decoder({"method": "states", "verify": "recursive", "num_speculative_tokens": 2})
    params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=6, ignore_eos=True)
    llm.generate([[5, 6, 7, 8]], params)
    assert [text[:4] for text, _ in llm.engine.drafter.ended] == [[5, 6, 7, 8]] * 3


def test_a_staged_look_up_is_given_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it needs may be known of the drafter that is built only, as of heads."""
    register(monkeypatch, StatesDrafter)
    monkeypatch.setattr(StatesDrafter, "needs", Needs())
    made = StatesDrafter.build

    def built(setup: Any) -> StatesDrafter:
        drafter = made(setup)
        drafter.needs = Needs(hidden_layers=(-1,))
        return drafter

    monkeypatch.setattr(StatesDrafter, "build", built)
    config = {"method": "staged", "model": drafter("llama"), "lookup": {"method": "states"}}
    with pytest.raises(ConfigError, match="lookup cannot be 'states', which reads the target's st"):
        LLM(target("llama"), speculative_config=config)


def test_the_lengths_of_rows_follow_from_their_texts() -> None:
    history = History([[1, 2], [3]], [[4], []])
    distribution = LogitsPipeline([RowOptions(SamplingParams().resolve({}))] * 2, 8)
    assert Rows(history, distribution, torch.zeros(2).long()).lengths == (3, 1)
    with pytest.raises(TypeError, match="lengths"):
        Rows(history, distribution, torch.zeros(2).long(), lengths=(9, 9))  # type: ignore[call-arg]


# -- columns that ride in the target's pass --------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AuxOptions(Options):
    kind: str = "tokens"
    """What is fed: tokens, embeddings, or states that enter later."""


class AuxDrafter(Drafter):
    """Lets a chain of two fixed tokens ride after the root, and remembers what the target says."""

    name: ClassVar[str] = "riders"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.DETERMINISTIC})
    Options: ClassVar[type[Any]] = AuxOptions
    RIDING = (9, 17)

    def __init__(self, decoder: Target, kind: str) -> None:
        self.target, self.kind = decoder, kind
        self.seen: list[tuple[list[int], Tensor]] = []

    @classmethod
    def build(cls, setup: Setup) -> AuxDrafter:
        return cls(setup.target, setup.options.kind)

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        drafts = [[11, 12, 13][:budget] for budget in budgets]
        proposal = deterministic_chains(drafts, rows.seeds.device)
        size = proposal.tree.size
        parents = on_device([[0, size + 1]]).expand(len(rows), -1)
        tokens = on_device([self.RIDING]).expand(len(rows), -1)
        return replace(proposal, aux_tokens=self._aux_tokens(rows, parents, tokens))

    def _aux_tokens(self, rows: Rows, parents: Tensor, tokens: Tensor) -> AuxTokens:
        if self.kind == "tokens":
            return AuxTokens(parents, tokens=tokens)
        if self.kind == "embeddings":
            return AuxTokens(parents, embeddings=self.target.embed(tokens))
        states = [hidden([*rows.since(row, 0), *self.RIDING], 1)[-2:] for row in range(len(rows))]
        return AuxTokens(parents, embeddings=torch.stack(states), entry_layer=1)

    def observe(self, round: Round) -> None:
        if round.aux_logits is not None:
            for row, logits in enumerate(round.aux_logits):
                self.seen.append((round.rows.since(row, 0), logits))


@pytest.mark.parametrize("kind", ["tokens", "embeddings", "states"])
def test_riders_see_the_text_and_nothing_sees_them(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    register(monkeypatch, AuxDrafter)
    llm = decoder({"method": "riders", "kind": kind, "num_speculative_tokens": 3})
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == EXPECTED
    seen = llm.engine.drafter.seen
    assert len(seen) > len(PROMPTS)
    for text, logits in seen:
        whole = on_device([[*text, *AuxDrafter.RIDING]])
        expected = target("llama")(input_ids=whole, use_cache=False).logits[0, -2:]
        assert torch.allclose(logits, expected, atol=1e-9)


def test_a_rule_that_scores_twice_refuses_riders(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, AuxDrafter)
    config = {"method": "riders", "num_speculative_tokens": 2,
              "verify": {"name": "reflective", "prompt": "abc"}}  # fmt: skip
    llm = LLM(letter_model(), tokenizer=LetterTokenizer(), speculative_config=config)
    with pytest.raises(ValueError, match="columns of its own"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, seed=1, temperature=1.0))


# -- several drafters in one request ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SeveralOptions(Options):
    model: Any = None
    """The model of all children."""
    random_streams: bool = True
    """Whether each child has a random stream of its own."""


class SeveralDrafter(Drafter):
    """Four draft models guess the next token independently of each other."""

    name: ClassVar[str] = "several"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.IID})
    trees: bool = True
    Options: ClassVar[type[Any]] = SeveralOptions

    def __init__(self, children: Sequence[Drafter]) -> None:
        self.children = children

    @classmethod
    def build(cls, setup: Setup) -> SeveralDrafter:
        config = {"method": "draft_model", "model": setup.options.model}
        children = [setup.child(config) for _ in range(4)]
        if not setup.options.random_streams:
            for child in children:
                child.random_stream = 1
        return cls(children)

    def begin(self, requests: Sequence[Request]) -> None:
        for child in self.children:
            child.begin(requests)

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        for child in self.children:
            child.end(requests, interrupted)

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        made = [child.propose(rows, [min(1, most) for most in budgets]) for child in self.children]
        if not made[0].tree.size:
            return made[0]
        tree = Tree.uniform([0] * len(made), len(rows))
        tokens = torch.cat([one.tokens for one in made], 1)
        counts = (len(made) * made[0].counts).minimum(torch.tensor(budgets))
        probs = [one.distribution.q for one in made if isinstance(one.distribution, Sampled)]
        distribution = Sampled(torch.cat(probs, 1)) if probs else Deterministic()
        return Proposal(tokens, tree, counts, distribution)


def several(random_streams: bool) -> LLM:
    model = letter_model()
    config = {
        "method": "several",
        "model": noisy_copy(model, 1.0),
        "random_streams": random_streams,
        "num_speculative_tokens": 4,
        "verify": "recursive",
    }
    return LLM(
        model,
        tokenizer=LetterTokenizer(),
        speculative_config=config,
        max_num_seqs=40,
        generation_config="none",
    )


def test_children_in_lanes_of_their_own_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, SeveralDrafter)
    plan = AuditPlan(LETTERS_IN, samples=160, tokens=3, power=False)
    report = audit_model(several(random_streams=True), plan, SamplingParams(temperature=1.0))
    assert report.ok, report
    assert report.acceptance > 0.05


@pytest.mark.parametrize("random_streams", [True, False])
def test_only_lanes_make_children_independent(
    monkeypatch: pytest.MonkeyPatch, random_streams: bool
) -> None:
    register(monkeypatch, SeveralDrafter)
    llm, siblings = several(random_streams), []
    with llm.engine.observing(lambda trace: siblings.extend(trace.proposal.tokens.tolist())):
        llm.generate(LETTERS_IN, SamplingParams(temperature=1.0, seed=1, max_tokens=8))
    assert all(len(set(row)) == 1 for row in siblings if row) != random_streams


def one_stream(world: World, parents: list[int]) -> Drafts:
    """Returns what children draft that draw with the same numbers: equal siblings."""
    drafts = iid(world, parents)
    equal = (drafts.tokens == drafts.tokens[:, :1]).all(1)
    mass = world.q[:, 0][:, drafts.tokens[:, 0]]  # [G, R]
    return replace(drafts, chance=torch.where(equal, mass, 0.0))


def test_the_gate_finds_equal_siblings_wrong() -> None:
    siblings = [shape for shape in FAST if shape.name == "2 siblings"]
    drafted = {"independent": iid, "one random stream": one_stream}
    report = audit_distributions(["recursive", "kseq"], drafted, shapes=siblings, pairs=10)
    verdicts = {(row.rule, row.drafted): row.passed for row in report.rows}
    assert verdicts == {
        ("recursive", "independent"): True,
        ("recursive", "one random stream"): False,
        ("kseq", "independent"): True,
        ("kseq", "one random stream"): False,
    }


# -- a drafter that knows a part of the vocabulary -------------------------------------------------

KNOWN = torch.tensor([3, 1, 7, 4, 0])


class FewTokensDrafter(Drafter):
    """Draws one of five tokens from a fixed distribution over its own vocabulary."""

    name: ClassVar[str] = "few"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.IID})

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = VocabMapping(KNOWN, vocabulary)

    @classmethod
    def build(cls, setup: Setup) -> FewTokensDrafter:
        return cls(setup.loaded.vocabulary)

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        size = max(budgets)
        own = torch.linspace(0, 1, len(KNOWN), dtype=torch.float64).expand(len(rows), size, -1)
        q = self.vocabulary.to_target_logits(own).softmax(-1)
        u = uniform(rows.seeds_of(self.random_stream), rows.positions, Role.DRAFT, size)
        tokens = Categorical.of(q).draw(u[..., None])[..., 0]
        tree = Tree.chain(len(rows), size)
        return Proposal(tokens, tree, torch.tensor(list(budgets)), Sampled(q))


def test_a_smaller_vocabulary_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, FewTokensDrafter)
    llm = LLM(
        letter_model(),
        tokenizer=LetterTokenizer(),
        speculative_config={"method": "few", "num_speculative_tokens": 3},
        max_num_seqs=40,
        generation_config="none",
    )
    plan = AuditPlan(LETTERS_IN, samples=320, power=False)
    report = audit_model(llm, plan, SamplingParams(temperature=1.0))
    assert report.ok, report
    assert 0 < report.acceptance < 1


def test_a_drafter_names_its_own_methods_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Resetting(FewTokensDrafter):
        name: ClassVar[str] = "resetting"

        def reset(self) -> None:
            """Something that only it knows."""

    register(monkeypatch, Resetting)
    assert find_drafter("resetting") is Resetting


# -- the target without some of its layers ---------------------------------------------------------


def test_a_view_without_the_upper_layers_is_the_shortened_model() -> None:
    from outpace.targets.base import PromptInputs, ScoreInputs, SubLayers
    from outpace.targets.hf.target import HFTarget

    model = target("llama")
    whole = HFTarget(model, rows=2, max_length=64)
    texts = [[5, 6, 7, 8, 9], [3, 1, 4, 1, 5]]
    for text in texts:
        whole.admit(PromptInputs(text))
    while whole.num_ready_rows < 2:
        whole.prefill(100)
    nothing = torch.zeros(2, 0, dtype=torch.long)
    whole.score(ScoreInputs(texts, nothing, Tree.chain(2, 0)))
    whole.commit([[], []])
    lengths = list(whole.lengths)
    upper = whole.view(SubLayers.of_layers([1]))
    none = whole.view(SubLayers())
    drafted = on_device([[9, 2], [6, 5]])
    upper.begin()
    none.begin()
    shortened = torch.cat([upper.forward(drafted[:, :1]), upper.forward(drafted[:, 1:])], 1)
    complete = none.forward(drafted)
    assert whole.lengths == lengths
    for row, text in enumerate(texts):
        read = on_device([[*text, *drafted[row].tolist()]])
        output = model(input_ids=read, use_cache=False, output_hidden_states=True)
        early = model.lm_head(model.model.norm(output.hidden_states[1][0, -2:]))
        assert torch.allclose(shortened[row], early, atol=1e-9)
        assert torch.allclose(complete[row], output.logits[0, -2:], atol=1e-9)
    scored = whole.score(ScoreInputs([[7], [7]], nothing, Tree.chain(2, 0))).logits[:, 0]
    for row, text in enumerate(texts):
        assert torch.allclose(scored[row], whole.forward_uncached([*text, 7])[-1], atol=1e-9)


def test_one_request_may_have_a_tag_and_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Request] = []
    forked: list[bool] = []
    llm = decoder({"method": "draft_model", "model": drafter("llama")})
    real = llm.engine.drafter.begin

    def begin(requests: Sequence[Request]) -> None:
        begun.extend(requests)
        forked.extend(request.forked_from is not None for request in requests)
        real(requests)

    monkeypatch.setattr(llm.engine.drafter, "begin", begin)
    llm.generate([[1, 2], [1, 2]], greedy(4))
    llm.generate([[1, 2, 3]], SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=4))
    assert len({request.id for request in begun}) == 5
    assert begun[0].group is None
    assert len({request.group for request in begun[2:]}) == 1
    assert forked == [False] * 3 + [True] * 2
