"""Drafters that cut texts into other tokens than the target, and drafters with short contexts."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outpace import LLM, SamplingParams
from outpace.audit.model import AuditPlan, audit_model
from outpace.errors import ConfigError, VocabularyMismatch
from outpace.methods.models.draft_model import DraftModel
from outpace.methods.models.intersection import IntersectionModel
from outpace.methods.models.spelling import coverage, shared_tokens, spellings
from outpace.methods.models.text import StringMatchModel
from outpace.methods.models.translation import (
    LONGEST,
    RetokenizedText,
    beginning,
    continuation,
    spoken,
)
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.plain import forward_uncached
from representatives import representatives
from targets.families import build, drafter, plain, target
from targets.generating import greedy, ids

from .tokenizers_made import KINDS, LINES, byte_level, gpt2

LENGTH = 14
PROMPTS = [
    "Once upon a time",
    "x",
    "\u65e5\u672c\u8a9e na\u00efve \U0001f642",
    "def total(values):\n",
]
MODES = ("intersection", "text")


@cache
def writer() -> Any:
    model = build("llama", vocab_size=len(byte_level().get_vocab()))
    model.generation_config.eos_token_id = None
    return model


@cache
def helper(kind: str) -> Any:
    """A model in other tokens; for tokens that spell the same, as good as the target."""
    own = KINDS[kind]()
    model = build("llama", vocab_size=len(own.get_vocab()), seed=7)
    ours = {spelt: number for number, spelt in spellings(byte_level()).items()}
    rows = writer()
    with torch.no_grad():
        model.load_state_dict(
            {**model.state_dict(), **{
                name: weight for name, weight in rows.state_dict().items()
                if "embed" not in name and "lm_head" not in name
            }}
        )  # fmt: skip
        for number, spelt in spellings(own).items():
            if spelt in ours:
                for mine, theirs in zip(_tables(model), _tables(rows), strict=True):
                    mine[number] = theirs[ours[spelt]]
    return model


def _tables(model: Any) -> tuple[Any, Any]:
    return model.model.embed_tokens.weight, model.lm_head.weight


def decoder(kind: str, mode: str, k: int = 3, rows: int = 4, **more: Any) -> LLM:
    config = {
        "method": "draft_model",
        "model": helper(kind),
        "tokenizer": KINDS[kind](),
        "vocabulary": mode,
        "num_speculative_tokens": k,
        **more,
    }
    return LLM(
        writer(), tokenizer=byte_level(), speculative_config=config, max_num_seqs=rows,
        generation_config="none",
    )  # fmt: skip


@cache
def undrafted(**options: Any) -> list[list[int]]:
    llm = LLM(writer(), tokenizer=byte_level(), generation_config="none")
    return ids(llm.generate(PROMPTS, greedy(LENGTH, **options)))


# -- exact -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_the_targets(kind: str, mode: str) -> None:
    llm = decoder(kind, mode)
    outputs = llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(outputs) == undrafted()
    assert ids(llm.generate(PROMPTS[2], greedy(LENGTH))) == undrafted()[2:3]
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0
    if kind == "shuffled":
        assert sum(output.metrics.num_accepted_tokens for output in outputs) > 10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_texts_begin_with_alike_is_read_once(kind: str, mode: str) -> None:
    beginning = "Once upon a time there was a girl who liked to play. "
    prompts = [beginning + end for end in ("One", "She")]
    llm, plain = decoder(kind, mode), LLM(writer(), tokenizer=byte_level())
    drafter: Any = llm.engine.drafter
    read: list[int] = []
    forward = drafter.runner.forward
    drafter.runner.forward = lambda tokens, *given, **named: (
        read.append(tokens.shape[1]) or forward(tokens, *given, **named)
    )
    firsts = []
    for prompt in prompts:
        read.clear()
        assert ids(llm.generate(prompt, greedy(6))) == ids(plain.generate(prompt, greedy(6)))
        firsts.append(read[0])
    assert firsts[1] < firsts[0] / 2


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_a_drafter_with_the_vocabulary_of_gpt2(mode: str) -> None:
    own = gpt2()
    config = {
        "method": "draft_model",
        "model": build("gpt2", vocab_size=len(own)),
        "tokenizer": own,
        "vocabulary": mode,
        "num_speculative_tokens": 3,
    }
    llm = LLM(
        writer(), tokenizer=byte_level(), speculative_config=config, max_num_seqs=4,
        generation_config="none",
    )  # fmt: skip
    outputs = llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(outputs) == undrafted()
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0


@pytest.mark.parametrize(
    ("kind", "mode"),
    representatives(
        itertools.product(["shuffled", "pieces"], MODES),
        [("shuffled", "intersection"), ("pieces", "text")],
    ),
)
def test_the_distribution_is_the_targets(kind: str, mode: str) -> None:
    prompts = [byte_level()(text).input_ids for text in PROMPTS[:2]]
    plan = AuditPlan(prompts, samples=120, tokens=6, power=False)
    report = audit_model(decoder(kind, mode, rows=40), plan, SamplingParams(temperature=0.5))
    assert report.ok, report


@pytest.mark.parametrize("mode", MODES)
def test_a_row_is_what_it_is_alone_and_again(mode: str) -> None:
    llm = decoder("shuffled", mode)
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=LENGTH, top_p=0.95)
    together = ids(llm.generate(PROMPTS, params))
    assert ids(llm.generate(PROMPTS, params)) == together
    assert [ids(llm.generate(text, params))[0] for text in PROMPTS] == together


@pytest.mark.parametrize("mode", MODES)
def test_coupled_texts_do_not_depend_on_the_drafter(mode: str) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=LENGTH)
    coupled = {"method": "none", "verify": "coupled"}
    alone = LLM(
        writer(), tokenizer=byte_level(), speculative_config=coupled, generation_config="none"
    )
    llm = decoder("shuffled", mode, verify="coupled")
    assert ids(llm.generate(PROMPTS, params)) == ids(alone.generate(PROMPTS, params))


@pytest.mark.parametrize("mode", MODES)
def test_samples_of_one_prompt_take_over_what_is_read(mode: str) -> None:
    params = SamplingParams(n=3, temperature=0.8, seed=2, max_tokens=8)
    outputs = decoder("shuffled", mode).generate(PROMPTS[0], params)[0].outputs
    apart = decoder("shuffled", mode, rows=1).generate(PROMPTS[0], params)[0].outputs
    assert [one.token_ids for one in outputs] == [one.token_ids for one in apart]


@pytest.mark.parametrize("mode", MODES)
def test_options_may_leave_nothing_that_is_shared(mode: str) -> None:
    loaded = [
        LoadedModel(writer(), byte_level(), "t"),
        LoadedModel(helper("shuffled"), KINDS["shuffled"](), "d"),
    ]
    shared = shared_tokens(loaded[0], loaded[1], torch.device("cpu"))
    missing = (shared.to_draft(torch.arange(shared.size)) < 0).nonzero()[:, 0].tolist()
    assert len(missing) > 3
    params = [greedy(5, allowed_token_ids=tuple(missing)), greedy(LENGTH)]
    outputs = decoder("shuffled", mode).generate(PROMPTS[:2], params)
    assert all(output.outputs[0].error is None for output in outputs)
    assert set(outputs[0].token_ids) <= set(missing)
    assert outputs[1].token_ids == undrafted()[1]


# -- what is read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_it_has_no_distributions_of_the_targets_tokens(mode: str) -> None:
    """A router that asks for them learns nothing, and goes on."""
    theirs = LoadedModel(helper("shuffled"), KINDS["shuffled"](), "theirs")
    model = {"model": theirs, "vocabulary": mode}
    config = {"method": "hedge", "drafters": [model, {"method": "ngram"}]}
    ours = LoadedModel(writer(), byte_level(), "ours")
    llm = LLM(ours, speculative_config={"num_speculative_tokens": 4, **config}, max_num_seqs=2)
    asked = [greedy(LENGTH), greedy(LENGTH, speculative="off")]
    assert ids(llm.generate(PROMPTS[:2], asked)) == undrafted()[:2]


@pytest.mark.parametrize("policy", ["entropy", "risk"])
def test_text_has_no_distributions_to_end_chains_by(policy: str) -> None:
    with pytest.raises(ConfigError, match="no chains with distributions"):
        decoder("shuffled", "text", length=policy)


def test_a_staged_model_in_other_tokens_is_refused() -> None:
    theirs = LoadedModel(helper("shuffled"), KINDS["shuffled"](), "theirs")
    ours = LoadedModel(writer(), byte_level(), "ours")
    with pytest.raises(VocabularyMismatch, match="different tokenizers"):
        LLM(ours, speculative_config={"method": "staged", "model": theirs})


@pytest.mark.parametrize("mode", MODES)
def test_only_what_is_new_is_read(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    llm, fed = decoder("shuffled", mode), []
    runner = llm.engine.drafter.runner
    real = runner.forward

    def counting(tokens: torch.Tensor, **more: Any) -> Any:
        fed.append(tokens.shape[1])
        return real(tokens, **more)

    monkeypatch.setattr(runner, "forward", counting)
    prompt = " ".join(LINES[:5])
    llm.generate(prompt, greedy(LENGTH))
    own = len(KINDS["shuffled"]()(prompt).input_ids)
    rounds = len(fed)
    assert sum(fed) < own + 3 * LENGTH + 4 * rounds


def test_the_end_of_a_text_is_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = byte_level().eos_token_id
    target, other = copy.deepcopy(writer()), copy.deepcopy(helper("shuffled"))
    target.generation_config.eos_token_id = ends
    other.generation_config.eos_token_id = KINDS["shuffled"]().eos_token_id
    shared = shared_tokens(
        LoadedModel(target, byte_level(), "t"),
        LoadedModel(other, KINDS["shuffled"](), "d"),
        torch.device("cpu"),
    )
    assert shared.to_draft(torch.tensor(ends)) == KINDS["shuffled"]().eos_token_id


# -- which way -------------------------------------------------------------------------------------


def test_auto_takes_the_intersection_where_it_covers_enough() -> None:
    assert isinstance(decoder("shuffled", "auto").engine.drafter, IntersectionModel)
    assert isinstance(decoder("unigram", "auto").engine.drafter, StringMatchModel)
    same = LLM(
        target("llama"),
        speculative_config={"model": drafter("llama"), "num_speculative_tokens": 2},
    )
    assert type(same.engine.drafter) is DraftModel


def test_the_vocabulary_may_be_refused() -> None:
    with pytest.raises(VocabularyMismatch, match="different tokenizers"):
        decoder("shuffled", "same")
    with pytest.raises(VocabularyMismatch, match="different tokenizers"):
        decoder("shuffled", "auto", method="draft_tree")
    with pytest.raises(ConfigError, match="needs method 'draft_model'"):
        decoder("shuffled", "text", method="draft_tree")
    with pytest.raises(ConfigError, match="vocabulary must be 'auto', 'same'"):
        decoder("shuffled", "union")
    with pytest.raises(VocabularyMismatch, match="the drafter has none"):
        decoder("shuffled", "text", tokenizer=None)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_tokens_spell_the_same(kind: str) -> None:
    own = LoadedModel(helper(kind), KINDS[kind](), "d")
    ours = LoadedModel(writer(), byte_level(), "t")
    shared = shared_tokens(ours, own, torch.device("cpu"))
    spelt, mine = spellings(byte_level()), spellings(KINDS[kind]())
    pairs = [(n, int(shared.to_draft(torch.tensor(n)))) for n in spelt]
    known = [(n, other) for n, other in pairs if other >= 0]
    assert len(known) > 100
    assert all(spelt[n] == mine[other] for n, other in known)
    assert len({other for _, other in known}) == len(known)
    assert 0 < coverage(ours, shared) <= 1


# -- texts in tokens -------------------------------------------------------------------------------

TEXTS = st.text(
    st.sampled_from("abcde gh rt.,\n\t\u00e9\u65e5\U0001f642 12 T"), min_size=1, max_size=60
)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, cuts=st.lists(st.integers(1, 9), max_size=12))
def test_a_text_is_translated_in_parts_as_in_one(kind: str, text: str, cuts: Sequence[int]) -> None:
    tokens, own = byte_level()(text).input_ids, KINDS[kind]()
    whole = RetokenizedText(byte_level(), own)
    found = whole.extend(tokens)
    assert own.decode(found, skip_special_tokens=True) == own.decode(
        beginning(own, text), skip_special_tokens=True
    )
    parts, at = RetokenizedText(byte_level(), own), 0
    for size in [*cuts, len(tokens)]:
        made = parts.extend(tokens[at : at + size])
        at = parts.read
    assert made == found
    assert not parts.unfinished


@pytest.mark.parametrize("kind", [*KINDS, "byte_level"])
@given(before=TEXTS, text=TEXTS)
def test_a_continuation_is_the_text_behind_another(kind: str, before: str, text: str) -> None:
    own = byte_level() if kind == "byte_level" else KINDS[kind]()
    known = beginning(own, before)
    tokens = continuation(own, text)
    assert spoken(own, known, tokens) == text
    assert len(tokens) <= len(text.encode()) + 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_is_decided_in_words(kind: str) -> None:
    text, own = " ".join(LINES * 2), KINDS[kind]()
    assert len(text) > 2 * LONGEST
    translation = RetokenizedText(byte_level(), own)
    tokens = byte_level()(text).input_ids
    for at in range(0, len(tokens), 5):
        made = translation.extend(tokens[at : at + 5])
    spelt = own.decode(made, skip_special_tokens=True)
    assert spelt == own.decode(beginning(own, text), skip_special_tokens=True)
    assert len(made) <= 1.1 * len(beginning(own, text))


def test_nothing_is_drafted_in_the_middle_of_a_character() -> None:
    tokens = byte_level()("\U0001f642").input_ids
    assert len(tokens) > 1
    translation = RetokenizedText(byte_level(), KINDS["pieces"]())
    translation.extend(tokens[:1])
    assert translation.unfinished
    translation.extend(tokens[1:])
    assert not translation.unfinished


# -- short contexts --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["draft_model", "draft_tree"])
def test_a_short_context_slides(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    short = copy.deepcopy(drafter("llama"))
    short.config.max_position_embeddings = 16
    branching = {"branching": [2, 1]} if method == "draft_tree" else {}
    llm = LLM(
        target("llama"),
        speculative_config={
            "method": method, "model": short, "num_speculative_tokens": 3, **branching
        },
        max_num_seqs=4,
    )  # fmt: skip
    model: Any = llm.engine.drafter
    read: list[tuple[list[int], torch.Tensor]] = []
    feed = model._feed

    def noting(live: Sequence[bool], *more: Any) -> tuple[torch.Tensor, Any]:
        logits, states = feed(live, *more)  # [B, 1, V]
        for row, drafting in enumerate(live):
            if drafting:
                text = model._rows[row]
                read.append((text.own[text.begin :], logits[row, 0]))
        return logits, states

    monkeypatch.setattr(model, "_feed", noting)
    prompts = [[5, 6, 7], [2, 3] * 20, [11]]
    outputs = llm.generate(prompts, greedy(40))
    assert ids(outputs) == plain("llama", 40, tuple(map(tuple, prompts)))
    assert min(output.metrics.num_draft_tokens for output in outputs) > 40
    lengths = [len(text) for text, _ in read]
    assert max(lengths) <= 16
    assert lengths.count(8) >= 3 * 3
    for text, logits in read[-9:]:
        assert torch.allclose(logits, forward_uncached(short, text)[-1], atol=1e-9)


def test_a_sample_that_joins_late_reads_its_prompt_where_the_window_of_another_has_moved() -> None:
    """Its text is the one that it has alone."""
    short = copy.deepcopy(helper("shuffled"))
    short.config.max_position_embeddings = 32
    llm = decoder("shuffled", "intersection", rows=2, model=short)
    prompt = "Once upon a time"
    params = SamplingParams(n=4, seed=3, temperature=1.0, max_tokens=40, ignore_eos=True)
    for output in llm.generate([prompt], params)[0].outputs:
        alone = SamplingParams(seed=output.seed, temperature=1.0, max_tokens=40, ignore_eos=True)
        assert llm.generate([prompt], alone)[0].token_ids == output.token_ids
