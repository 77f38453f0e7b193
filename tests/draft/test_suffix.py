"""Suffix decoding: what it drafts, from whose texts, and that the text stays what it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.words import word_tokenizer
from outpace import LLM, SamplingParams
from outpace.errors import ConfigError, VocabularyMismatch
from outpace.methods.lookup.datastore import Datastore, fingerprint_of
from outpace.methods.lookup.suffix import SuffixDrafter, SuffixOptions
from outpace.verify.registry import rules
from targets.families import CONTEXT, PROMPTS, VOCABULARY, plain, target
from targets.generating import greedy, ids

LENGTH = 24
EXPECTED = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
SAMPLED = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True, seed=7)


def decoder(**more: Any) -> LLM:
    config = {"method": "suffix", "num_speculative_tokens": 6, **more}
    return LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)


def drafted(llm: LLM, prompt: list[int], params: SamplingParams) -> list[list[list[int]]]:
    """Returns what each round of one text drafted: tokens and parents."""
    found = []

    def note(trace: Any) -> None:
        count = int(trace.proposal.counts[0])
        tree = trace.proposal.tree.parents[0, :count].tolist()
        found.append([trace.proposal.tokens[0, :count].tolist(), tree])

    with llm.engine.observing(note):
        llm.generate([prompt], params)
    return found


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rule", ["match", "token", "block", "recursive", "traversal", "coupled"])
def test_greedy_texts_are_the_targets_own(tree: bool, rule: str) -> None:
    if tree and not rules()[rule].trees:
        with pytest.raises(ConfigError, match="chains only"):
            decoder(tree=tree, verify=rule)
        return
    llm = decoder(tree=tree, verify=rule, suffix_decoding_max_spec_factor=3.0)
    for _ in range(2):  # the second time with what the first one left in the store
        outputs = llm.generate(PROMPTS, greedy(LENGTH))
        assert ids(outputs) == EXPECTED
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > LENGTH
    assert ids(llm.generate(PROMPTS[2:3], greedy(LENGTH))) == EXPECTED[2:3]


def test_a_finished_text_helps_the_next_one() -> None:
    llm, alone = decoder(), decoder(suffix_decoding_max_cached_requests=0)
    passes = []
    for one in (llm, alone):
        for _ in range(2):
            (output,) = one.generate([PROMPTS[0]], greedy(LENGTH))
            passes.append(output.metrics.num_target_passes)
    first, second, *without = passes
    assert second < first == without[0] == without[1]
    assert alone.engine.drafter.nbytes < llm.engine.drafter.nbytes


@pytest.mark.parametrize("tree", [False, True])
def test_other_texts_change_nothing_for_a_seeded_row(tree: bool) -> None:
    llm, prompt = decoder(tree=tree), [2, 3] * 6
    before = drafted(llm, prompt, SAMPLED)
    text = ids(llm.generate([prompt], SAMPLED))
    llm.generate(PROMPTS, greedy(LENGTH))
    llm.generate([prompt] * 4, replace(SAMPLED, seed=None))
    assert drafted(llm, prompt, SAMPLED) == before
    assert ids(llm.generate([prompt], SAMPLED)) == text
    assert any(tokens for tokens, _ in before)


def test_a_draft_is_as_long_as_its_match() -> None:
    pattern = [*range(10, 20), 9]
    for factor, longest in ((0.5, 3), (1.0, 6)):
        llm = decoder(suffix_decoding_max_spec_factor=factor, suffix_decoding_max_tree_depth=6,
                      num_speculative_tokens=12)  # fmt: skip
        first = drafted(llm, [*pattern, *pattern, *pattern[:8]], greedy(2))
        assert first[0][0] == [18]  # of two tokens the second one comes with the round
        first = drafted(llm, [*pattern, *pattern, *pattern[:8]], greedy(14))
        assert first[0][0] == [18, 19, 9, 10, 11, 12][:longest]


def test_a_tree_drafts_what_a_chain_leaves_out() -> None:
    prompt = [5, 6, 7, 30, 5, 6, 8, 31, 5, 6, 7, 32, 5, 6]
    more = {"suffix_decoding_max_spec_factor": 3.0, "suffix_decoding_max_cached_requests": 0}
    chain = drafted(decoder(**more), prompt, greedy(8))[0]
    tree = drafted(decoder(tree=True, **more), prompt, greedy(8))[0]
    assert chain[0][0] == tree[0][0] == 7
    assert [token for token, parent in zip(*tree, strict=True) if parent == 0] == [7, 8]


def test_rows_without_a_match_draft_nothing() -> None:
    assert drafted(decoder(), [1, 2, 3], greedy(8))[0] == [[], []]
    assert drafted(decoder(suffix_decoding_min_token_prob=1.0), [1, 2, 1, 3, 1], greedy(8))[0] == [
        [],
        [],
    ]


def test_the_store_is_bounded() -> None:
    llm = decoder(max_cached_tokens=60)
    for seed in range(8):
        llm.generate(PROMPTS, replace(SAMPLED, seed=seed))
    drafter = llm.engine.drafter
    assert isinstance(drafter, SuffixDrafter)
    assert 30 < drafter.past.tokens <= 60
    assert llm.memory["drafter_cache"] == drafter.nbytes > 0


def test_a_text_that_was_put_aside_is_in_the_store_once() -> None:
    config = {"method": "suffix", "num_speculative_tokens": 4}
    llm = LLM(
        target("llama"),
        speculative_config=config,
        max_num_seqs=4,
        max_model_len=CONTEXT,
        max_batch_total_tokens=300,
    )
    requests = [one for prompt in PROMPTS for one in llm.requests(prompt, greedy(90))]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    llm.engine.step()  # in which the last ones leave
    assert sum(request.preemptions for request in requests) > 1
    drafter = llm.engine.drafter
    assert isinstance(drafter, SuffixDrafter)
    kept = drafter.past.tokens - len(drafter.past)  # without what separates them
    written = sum(len(request.output_ids) for request in requests)
    assert 0.9 * written < kept <= written


def test_an_interrupted_text_is_no_finished_one() -> None:
    llm, rounds = decoder(), []

    def stop(trace: Any) -> None:
        rounds.append(trace)
        if len(rounds) == 3:
            raise KeyboardInterrupt

    with llm.engine.observing(stop), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == EXPECTED
    drafter = llm.engine.drafter
    assert isinstance(drafter, SuffixDrafter)
    assert len(drafter.past) == len(PROMPTS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix_decoding_max_tree_depth", 0),
        ("suffix_decoding_max_tree_depth", 65),
        ("suffix_decoding_max_cached_requests", -1),
        ("max_cached_tokens", 1.5),
        ("suffix_decoding_max_spec_factor", "much"),
        ("suffix_decoding_max_spec_factor", float("nan")),
        ("suffix_decoding_min_token_prob", 1.1),
        ("tree", "yes"),
    ],
)
def test_bad_options_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        SuffixOptions(**{name: value})  # type: ignore[arg-type]


# -- datastores ------------------------------------------------------------------------------------

OTHERS = [[*prompt[-2:], *text] for prompt, text in zip(PROMPTS, EXPECTED, strict=True)] * 2


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rule", ["match", "token", "recursive", "coupled"])
def test_greedy_texts_stay_with_a_datastore(texts: bool, tree: bool, rule: str) -> None:
    if tree and not rules()[rule].trees:
        pytest.skip("takes chains only")
    store = Datastore.of(OTHERS, VOCABULARY)
    given = store if texts else store.without_texts()
    cold = decoder(suffix_decoding_max_cached_requests=0)
    llm = decoder(tree=tree, verify=rule, datastore=given, suffix_decoding_max_cached_requests=0)
    without, outputs = (each.generate(PROMPTS, greedy(LENGTH)) for each in (cold, llm))
    assert ids(outputs) == ids(without) == EXPECTED
    passes = [sum(one.metrics.num_target_passes for one in each) for each in (outputs, without)]
    assert passes[0] < 0.7 * passes[1]


def test_the_surer_one_of_match_and_table_is_drafted() -> None:
    # The table says 7 after 6 with a chance of .98, and goes on alone; the text had a match of two.
    store = Datastore.of([[6, 7, 8, 9]] * 40, VOCABULARY).without_texts()
    llm = decoder(datastore=store, suffix_decoding_max_cached_requests=0)
    assert drafted(llm, [5, 6, 30, 31, 5, 6], greedy(8))[0] == [[7, 8, 9], [0, 1, 2]]
    # With .62 a long match is surer, and the table goes on where that has nothing more to say.
    store = Datastore.of([[6, 7], [6, 7], *[[30, 31]] * 40], VOCABULARY).without_texts()
    llm = decoder(datastore=store, suffix_decoding_max_cached_requests=0)
    own = [*range(10, 20), 6, 30]
    assert drafted(llm, [*own, *own[:-1]], greedy(8))[0][0][:2] in ([30, 10], [30, 31])


def test_other_texts_change_nothing_for_a_seeded_row_with_a_datastore() -> None:
    store, prompt = Datastore.of(OTHERS, VOCABULARY), [2, 3] * 6
    llm = decoder(datastore=store)
    before = drafted(llm, prompt, SAMPLED)
    text = ids(llm.generate([prompt], SAMPLED))
    llm.generate(PROMPTS, greedy(LENGTH))
    assert drafted(llm, prompt, SAMPLED) == before
    assert ids(llm.generate([prompt], SAMPLED)) == text


def test_what_was_written_is_saved_for_later(tmp_path: Path) -> None:
    first, folder = decoder(), tmp_path / "known"
    with pytest.raises(ConfigError, match="nothing to save"):
        first.save_drafter(folder)
    first.generate(PROMPTS, greedy(LENGTH))
    first.save_drafter(folder)
    saved = [text.tolist() for text in Datastore.open(folder).texts()]
    assert len(saved) == len(EXPECTED)
    for text, whole in zip(sorted(saved), sorted(EXPECTED), strict=True):  # to its last round
        assert text == whole[: len(text)]
        assert len(text) > LENGTH - 8
    later, cold = decoder(datastore=folder), decoder()
    outputs, without = (llm.generate(PROMPTS, greedy(LENGTH)) for llm in (later, cold))
    assert ids(outputs) == ids(without)
    passes = [sum(one.metrics.num_target_passes for one in each) for each in (outputs, without)]
    assert passes[0] < passes[1]
    for llm in (later, cold):
        llm.forget_texts()
    with pytest.raises(ConfigError, match="nothing to save"):
        cold.save_drafter(folder)
    later.save_drafter(folder)  # what it was given
    assert Datastore.open(folder).description.texts == len(PROMPTS)
    bounded = decoder(datastore=folder, max_cached_tokens=2 * LENGTH + 2)
    bounded.save_drafter(folder)
    assert [text.tolist() for text in Datastore.open(folder).texts()] == saved[-2:]


def test_a_table_that_was_given_is_saved_with_the_texts(tmp_path: Path) -> None:
    store = Datastore.of([[50, 51]] * 3, VOCABULARY).without_texts()
    llm = decoder(datastore=store)
    llm.generate(PROMPTS[:1], greedy(LENGTH))
    llm.save_drafter(tmp_path / "known")
    again = Datastore.open(tmp_path / "known")
    assert again.description.texts == 1
    assert again.table.after([50]) == store.table.after([50])
    later = decoder(datastore=tmp_path / "known")
    later.save_drafter(tmp_path / "known")
    assert Datastore.open(tmp_path / "known").table.after([50]) == store.table.after([50])


def test_saving_leaves_what_is_in_use_as_it_was(tmp_path: Path) -> None:
    """The files of a folder are mapped: a shorter one in their place would end the program."""
    folder = tmp_path / "known"
    Datastore.of([*OTHERS, [1] * 4000], VOCABULARY).save(folder)
    llm = decoder(datastore=folder, max_cached_tokens=LENGTH)
    before = drafted(llm, PROMPTS[0], SAMPLED)
    llm.generate(PROMPTS, greedy(LENGTH))
    llm.save_drafter(folder)
    assert Datastore.open(folder).description.tokens < LENGTH
    assert drafted(llm, PROMPTS[0], SAMPLED) == before
    assert not list(folder.glob("*.part"))


def test_auto_takes_a_look_up_with_a_datastore_and_saves_it(tmp_path: Path) -> None:
    store = Datastore.of(OTHERS, VOCABULARY)
    lookups = [{"method": "suffix", "datastore": store}, {"method": "ngram"}]
    config = {"method": "auto", "lookups": lookups, "num_speculative_tokens": 6}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == EXPECTED
    llm.save_drafter(tmp_path / "known")
    assert Datastore.open(tmp_path / "known").description.texts == len(OTHERS) + len(PROMPTS)


@pytest.mark.parametrize("method", ["suffix", "recycling"])
def test_other_datastores_are_refused(method: str, tmp_path: Path) -> None:
    def built(given: Any, tokenizer: Any = None) -> LLM:
        config = {"method": method, "datastore": given}
        return LLM(target("llama"), tokenizer=tokenizer, speculative_config=config)

    words = word_tokenizer()
    Datastore.of(OTHERS, VOCABULARY, "words", fingerprint_of(words)).save(tmp_path / "d")
    built(str(tmp_path / "d"), words)
    words.add_tokens(["w64"])
    with pytest.raises(VocabularyMismatch, match="another tokenizer"):
        built(tmp_path / "d", words)
    for given, said in ((3, "must be the folder"), ("nowhere", "is no datastore")):
        with pytest.raises(ConfigError, match=said):
            built(given)
    with pytest.raises(VocabularyMismatch, match="tokens up to"):
        built(Datastore.of(OTHERS, VOCABULARY + 1))
