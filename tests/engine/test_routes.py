"""Several drafters in one: exact, each row as it is alone, each child told what it must know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.audit.letters import LetterTokenizer, letter_model
from outpace.audit.model import AuditPlan, audit_model
from outpace.core.proposal import DraftSampling, Proposal, Sampled
from outpace.draft.base import Round, Rows
from outpace.draft.registry import find_drafter
from outpace.draft.token_trees import TokenTree, token_trees_of
from outpace.errors import ConfigError, IncompatibleRule
from outpace.methods.choosers.staged import Staged
from outpace.methods.lookup.suffix import SuffixDrafter
from outpace.methods.models.noisy_copy import noisy_copy
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.plain import forward_uncached
from targets.families import CONTEXT, PROMPTS, plain, target
from targets.generating import greedy, ids

LENGTH = 16
EXPECTED = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
SAMPLED = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=11)
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}


def model_of(noise: float, seed: int = 2) -> dict[str, Any]:
    return {"model": other(noise, seed)}


@lru_cache
def other(noise: float, seed: int) -> Any:
    return noisy_copy(target("llama"), noise, seed)


NEAR, FAR = model_of(0.2), model_of(0.6, seed=3)
CONFIGS: dict[str, dict[str, Any]] = {
    "precedence": {"drafters": [NGRAM, NEAR]},
    "precedence of trees": {"drafters": [NGRAM, {"method": "draft_tree", **NEAR}]},
    "merge": {"drafters": [NGRAM, NEAR, FAR], "combine": "merge"},
    "merge of one distribution": {"drafters": [NEAR, NEAR, NEAR], "combine": "merge"},
    "vote": {"drafters": [NEAR, FAR, NGRAM], "combine": "vote"},
    "staged": {"method": "staged", "lookup": NGRAM, **NEAR},
}


def decoder(name: str, model: Any = None, **options: Any) -> LLM:
    config = {"method": "ensemble", "num_speculative_tokens": 6, **CONFIGS[name]}
    engine = {"max_num_seqs": 4, "max_model_len": CONTEXT, **options}
    return LLM(model or target("llama"), speculative_config=config, **engine)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_texts_are_those_of_generate(name: str) -> None:
    llm = decoder(name)
    outputs = llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(outputs) == EXPECTED
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 5
    assert ids(llm.generate([PROMPTS[2]], greedy(LENGTH))) == [EXPECTED[2]]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_seeded_row_is_what_it_is_alone(name: str) -> None:
    llm = decoder(name)
    params = [SAMPLED, greedy(LENGTH), SAMPLED, SAMPLED]
    together = ids(llm.generate(PROMPTS[:4], params))
    alone = [ids(llm.generate([PROMPTS[row]], params[row]))[0] for row in (0, 2)]
    assert alone == [together[0], together[2]]


def letters(config: dict[str, Any]) -> LLM:
    return LLM(
        letter_model(),
        tokenizer=LetterTokenizer(),
        speculative_config={"num_speculative_tokens": 4, **config},
        max_num_seqs=40,
        generation_config="none",
    )


def letter_configs() -> dict[str, dict[str, Any]]:
    near, far = ({"model": noisy_copy(letter_model(), noise)} for noise in (0.5, 1.5))
    return {
        "precedence": {"method": "ensemble", "drafters": [NGRAM, near]},
        "merge": {"method": "ensemble", "drafters": [near, far], "combine": "merge"},
        "one distribution": {"method": "ensemble", "drafters": [far, far], "combine": "merge"},
        "one distribution, kseq": {
            "method": "ensemble", "drafters": [far, far], "combine": "merge", "verify": "kseq"
        },
        "vote": {"method": "ensemble", "drafters": [near, far, far], "combine": "vote"},
        "staged": {"method": "staged", "lookup": NGRAM, **near, "verify": "block"},
    }  # fmt: skip


@pytest.mark.parametrize("name", letter_configs())
def test_sampled_texts_follow_the_distribution(name: str) -> None:
    plan = AuditPlan([[1, 2, 3], [4], [5, 6, 5, 6]], samples=120, tokens=5, power=False)
    report = audit_model(letters(letter_configs()[name]), plan, SamplingParams(temperature=1.0))
    assert report.ok, report
    assert report.acceptance > 0.05


def test_equal_models_of_one_distribution_read_the_same_part_of_a_long_text() -> None:
    """However many tokens each of them drafts: siblings that say to be of one distribution are."""
    short = noisy_copy(target("llama"), 0.2)
    short.config.max_position_embeddings = 32
    equal = {"model": LoadedModel(short, None, "short", same_tokens=True)}
    config = {"method": "ensemble", "drafters": [equal] * 2, "combine": "merge"}
    config["num_speculative_tokens"] = 7
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=2, max_model_len=CONTEXT)
    assert llm.engine.drafter.sampling_kinds == {DraftSampling.IID}
    forks = 0

    def watch(trace: Round) -> None:
        nonlocal forks
        made = trace.proposal
        for row, nodes in enumerate(token_trees_of(made)):
            first = [node for node, parent in enumerate(nodes.parents) if parent == 0]
            if len(first) == 2 and isinstance(made.distribution, Sampled):
                one, two = made.distribution.q[row, first]
                assert torch.allclose(one, two, atol=1e-9)
                forks += 1

    asked = replace(SAMPLED, max_tokens=100)
    with llm.engine.observing(watch):
        llm.generate([PROMPTS[0], PROMPTS[3]], asked)
    assert forks > 40


def test_drafts_of_several_distributions_are_taken_as_drawn() -> None:
    """As given tokens ("match") fewer of them would be accepted."""
    accepted = {}
    for rule in ("recursive", "match"):
        llm = letters({**letter_configs()["merge"], "verify": rule})
        assert llm.engine.drafter.sampling_kinds == {DraftSampling.PER_DRAFTER}
        seen: list[Proposal] = []
        with llm.engine.observing(lambda trace, seen=seen: seen.append(trace.proposal)):
            outputs = llm.generate([[1, 2, 3]] * 40, SamplingParams(temperature=1.0, max_tokens=24))
        assert {DraftSampling.of(each) for each in seen if each.tree.size} == {
            DraftSampling.PER_DRAFTER
        }
        accepted[rule] = sum(each.metrics.num_accepted_tokens for each in outputs)
    assert accepted["recursive"] > 1.2 * accepted["match"]


def test_rows_of_several_distributions_stay_so_beside_others() -> None:
    merging = letter_configs()["merge"]
    routes = {"method": "tagged", "routes": {"both": merging}, "default": merging["drafters"][0]}
    llm = letters({**routes, "verify": "recursive"})
    seen: list[Proposal] = []
    options = SamplingParams(temperature=1.0, max_tokens=12)
    params = [replace(options, tag="both"), options] * 4
    with llm.engine.observing(lambda trace: seen.append(trace.proposal)):
        llm.generate([[1, 2, 3]] * 8, params)
    forked = [each for each in seen if each.tree.max_siblings > 1]
    assert forked
    assert {DraftSampling.of(each) for each in forked} == {DraftSampling.PER_DRAFTER}
    tree = {"method": "draft_tree", **merging["drafters"][1]}
    with pytest.raises(ConfigError, match="with replacement and another one without"):
        letters({**routes, "default": tree})


def test_rules_for_one_distribution_refuse_several() -> None:
    with pytest.raises(
        IncompatibleRule, match="sampled from several distributions: choose another rule"
    ):
        letters({**letter_configs()["merge"], "verify": "kseq"})


def test_staged_drafts_what_the_model_drafts_alone_in_fewer_passes() -> None:
    text = [5, 6, 7, 8, 9, 10] * 4
    seen: dict[str, list[Any]] = {}
    passes = {}
    for name, config in {"alone": NEAR, "staged": CONFIGS["staged"]}.items():
        config = {"num_speculative_tokens": 6, **config}
        llm = LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT)
        found: list[Any] = []
        with llm.engine.observing(lambda trace, to=found: to.append(trace.proposal)):
            llm.generate([text], SamplingParams(temperature=0.2, seed=1, max_tokens=40))
        seen[name] = found
        passes[name] = llm.engine.drafter.runner.passes  # type: ignore[attr-defined]
    for one, two in zip(*seen.values(), strict=True):
        assert torch.equal(one.tokens, two.tokens)
        assert isinstance(one.distribution, Sampled) == isinstance(two.distribution, Sampled)
        if isinstance(one.distribution, Sampled) and one.tree.size:
            assert torch.allclose(one.distribution.q, two.distribution.q, atol=1e-9)
    assert passes["staged"] < passes["alone"]


def test_a_child_reads_each_token_once_whoever_drafted_it() -> None:
    """A model that was not asked, or whose draft was not taken, feeds what was committed since."""
    llm = decoder("vote")
    child: Any = llm.engine.drafter.children[0]  # type: ignore[attr-defined]
    fed: list[int] = []
    real = child.runner.forward

    def counting(tokens: Any, *args: Any, **options: Any) -> Any:
        fed.append(tokens.shape[1])
        return real(tokens, *args, **options)

    child.runner.forward = counting
    output = llm.generate([PROMPTS[0]], greedy(40))[0]
    rounds = output.metrics.num_target_passes
    assert sum(fed) <= len(PROMPTS[0]) + 40 + 7 * rounds


def test_rows_may_be_drafted_for_by_different_children() -> None:
    llm = decoder("precedence")
    mixed = []

    def watch(trace: Round) -> None:
        mixed.append(set(trace.proposal.methods))
        distribution = trace.proposal.distribution
        if isinstance(distribution, Sampled) and distribution.fixed is not None:
            certain = distribution.q.gather(-1, trace.proposal.tokens[..., None])[..., 0]
            assert bool((certain[distribution.fixed] == 1).all())

    with llm.engine.observing(watch):
        llm.generate([[5, 6, 5, 6, 5, 6], [9, 8, 7]], [SAMPLED, SAMPLED])
    assert {"ngram", "draft_model"} in mixed


LEARNING = {**NEAR, "online": {"every": 1}}
EITHER = {"method": "ucb", "drafters": [NEAR, NGRAM]}


@pytest.mark.parametrize(
    ("child", "drawn"),
    [
        (NEAR, DraftSampling.IID),
        (LEARNING, DraftSampling.PER_DRAFTER),
        (EITHER, DraftSampling.PER_DRAFTER),
    ],
    ids=["model", "learning", "choosing"],
)
def test_equal_drafters_that_go_their_own_ways_have_distributions_of_their_own(
    child: dict[str, Any], drawn: DraftSampling
) -> None:
    config = {"method": "ensemble", "drafters": [child, dict(child)], "combine": "merge"}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=2)
    assert llm.engine.drafter.sampling_kinds == {drawn}
    llm.generate(PROMPTS[:2], replace(SAMPLED, seed=None))


@pytest.mark.parametrize("combine", ["vote", "merge"])
def test_a_model_that_learns_is_told_what_became_of_its_own_draft(
    combine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has cached are its own tokens. It learns from what the target said of others."""
    learning = {**FAR, "online": {"every": 10_000}}  # never, in so short a text
    config = {"method": "ensemble", "drafters": [NEAR, learning], "combine": combine}
    config["num_speculative_tokens"] = 8
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=2, max_model_len=CONTEXT)
    online: Any = llm.engine.drafter.children[1]  # type: ignore[attr-defined]
    model, read = online._inner, []
    feed = model._feed

    def noting(live: Sequence[bool], *more: Any, **asked: Any) -> Any:
        found = feed(live, *more, **asked)
        texts = [list(row.own) for row in model._rows]
        read.extend((texts[row], found[0][row, 0]) for row, on in enumerate(live) if on)
        return found

    monkeypatch.setattr(model, "_feed", noting)
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == EXPECTED
    assert read
    for text, logits in read:
        assert torch.allclose(logits, forward_uncached(model.loaded.model, text)[-1], atol=1e-9)
    learned = [
        (one.tokens, at, top) for one in online._windows for at, top in one.top_tokens.items()
    ]
    assert learned
    for tokens, at, top in learned:
        assert tokens[at + 1 : at + 2] in ([], [int(top[0])])


def test_the_nodes_of_a_ragged_tree() -> None:
    llm = decoder("merge")
    trees: list[Sequence[TokenTree]] = []
    with llm.engine.observing(lambda trace: trees.append(token_trees_of(trace.proposal))):
        llm.generate(PROMPTS, greedy(LENGTH))
    rows = [row for tree in trees for row in tree]
    assert any(not row.is_chain for row in rows)
    for row in rows:
        assert len(row) <= 6
        assert all(parent <= place for place, parent in enumerate(row.parents))
        assert len(set(zip(row.parents, row.tokens, strict=True))) == len(row)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"drafters": [NGRAM]}, "two drafters or more"),
        ({"drafters": [NGRAM, {"method": "ngam"}]}, "did you mean 'ngram'"),
        ({"drafters": [NGRAM, NGRAM], "combine": "vot"}, "did you mean 'vote'"),
        ({"drafters": [NGRAM, {**NEAR, "verify": "token"}]}, "'verify' cannot be set"),
        ({"drafters": [NGRAM, {**NEAR, "num_speculative_tokens": 2}]}, "set it for all of them"),
        ({"drafters": "ngram"}, "must list"),
    ],
)
def test_mistakes_are_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(target("llama"), speculative_config={"method": "ensemble", **config})


def test_a_staged_model_has_the_targets_tokens() -> None:
    config = {"method": "staged", **NEAR, "vocabulary": "text"}
    with pytest.raises(ConfigError, match="cannot be 'text' for method 'staged'"):
        LLM(target("llama"), speculative_config=config)


def test_a_staged_look_up_runs_no_model() -> None:
    config = {"method": "staged", "lookup": NEAR, **NEAR}
    with pytest.raises(ConfigError, match="lookup cannot be 'draft_model', which runs a model"):
        LLM(target("llama"), speculative_config=config)


@pytest.mark.parametrize("method", ["lookahead", "pass", "hidden_transfer"])
def test_a_staged_look_up_does_not_ride_in_the_targets_pass(method: str) -> None:
    """Its columns would stand after a draft that is not its own."""
    riding = find_drafter(method).dummy_options(LoadedModel(target("llama"), None, "llama"))
    config = {"method": "staged", "lookup": {"method": method, **riding}, **NEAR}
    with pytest.raises(ConfigError, match=f"lookup cannot be {method!r}, which drafts inside"):
        LLM(target("llama"), speculative_config=config)


def test_a_rule_that_scores_twice_refuses_riding_children_when_it_is_loaded() -> None:
    model = {"model": noisy_copy(letter_model(), 0.5)}
    config = {"method": "ensemble", "drafters": [{"method": "lookahead"}, model]}
    rule = {"name": "reflective", "prompt": "abc"}
    with pytest.raises(ConfigError, match="a drafter that feeds columns of its own"):
        letters({**config, "verify": rule})


@pytest.mark.parametrize(
    "look_up",
    [{"method": "recycling"}, {"method": "hedge", "drafters": [NGRAM, {"method": "suffix"}]}],
    ids=["recycling", "hedge"],
)
def test_a_staged_look_up_is_given_the_distributions_that_it_learns_from(
    look_up: dict[str, Any],
) -> None:
    config = {"method": "staged", "lookup": look_up, "num_speculative_tokens": 6, **NEAR}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)
    assert llm.engine.drafter.needs.softmax_probs
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == EXPECTED


def test_a_staged_look_up_is_counted_and_saved(tmp_path: Path) -> None:
    look_up = {"method": "hedge", "drafters": [NGRAM, {"method": "suffix"}]}
    state = tmp_path / "state.json"
    config = {"method": "staged", "lookup": {**look_up, "state": str(state)}, **NEAR}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)
    llm.generate(PROMPTS, greedy(LENGTH))
    assert state.exists()
    config = {"method": "staged", "lookup": {"method": "suffix"}, **NEAR}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)
    llm.generate(PROMPTS, greedy(LENGTH))
    staged: Any = llm.engine.drafter
    assert staged.nbytes == super(Staged, staged).nbytes + staged.lookup.nbytes
    llm.save_drafter(tmp_path / "store")
    assert any((tmp_path / "store").iterdir())
    config = {"method": "staged", "lookup": NGRAM, **NEAR}
    with pytest.raises(ConfigError, match="'staged' learns nothing"):
        LLM(target("llama"), speculative_config=config).save_drafter(tmp_path / "none")


def test_a_model_beside_look_ups_keeps_its_rule() -> None:
    """The rule "match" would accept less of sampled drafts."""
    for look_up in ("suffix", "recycling"):
        config = {"method": "auto", "lookups": [{"method": look_up}], **NEAR}
        llm = LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT)
        assert llm.engine.verifier.rule.name == "token"


def test_a_look_up_is_asked_once_a_round_whoever_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    propose, asked, rounds = SuffixDrafter.propose, [0], [0]

    def counted(self: SuffixDrafter, rows: Rows, budgets: Sequence[int]) -> Proposal:
        asked[0] += 1
        return propose(self, rows, budgets)

    def count(round: Round) -> None:
        rounds[0] += 1

    monkeypatch.setattr(SuffixDrafter, "propose", counted)
    config = {"method": "auto", "num_speculative_tokens": 4, **NEAR}
    llm = LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT)
    asked[0] = 0
    with llm.engine.observing(count):
        llm.generate(PROMPTS, greedy(LENGTH))
    assert 0 < asked[0] <= rounds[0]


@pytest.mark.parametrize("method", ["hedge", "ucb", "ensemble", "tagged", "auto"])
def test_look_ups_that_draft_trees_need_no_rule_to_be_named(method: str) -> None:
    both = [NGRAM, {"method": "recycling"}]
    given = {
        "tagged": {"routes": {"copying": NGRAM}, "default": {"method": "recycling"}},
        "auto": {"lookups": both},
    }.get(method, {"drafters": both})
    llm = LLM(
        target("llama"), speculative_config={"method": method, **given}, max_model_len=CONTEXT
    )
    assert llm.engine.verifier.rule.name == "match"
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == EXPECTED


@pytest.mark.parametrize("how", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_a_model_that_is_named_twice_is_there_once(how: dict[str, Any]) -> None:
    """However it is loaded: the second one takes it as it is."""
    llm = LLM(
        speculative_config={
            "method": "ensemble",
            "drafters": [{"method": "draft_model", "model": str(drafter_path()), **how}] * 2,
            "combine": "merge",
        }
    )
    one, two = llm.engine.drafter.children  # type: ignore[attr-defined]
    assert one.loaded.model is two.loaded.model
    assert one.random_stream != two.random_stream


def drafter_path() -> Any:
    from outpace.llm import BUNDLED

    return BUNDLED / "drafter"
