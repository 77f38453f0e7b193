"""Retrieval: the text stays the target's, and what is drafted comes from the datastore alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from api.words import word_tokenizer
from outpace import LLM, SamplingParams
from outpace.errors import ConfigError, VocabularyMismatch
from outpace.methods.lookup.datastore import Datastore, fingerprint_of
from outpace.verify.registry import rules
from targets.families import CONTEXT, PROMPTS, VOCABULARY, plain, target
from targets.generating import greedy, ids

LENGTH = 24
EXPECTED = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
CORPUS = [[*prompt, *text] for prompt, text in zip(PROMPTS, EXPECTED, strict=True)]
# Half of the texts go another way in the middle.
CORPUS += [[*text[:15], *reversed(text[15:])] for text in CORPUS[:2]]


def decoder(datastore: Any = None, tokenizer: Any = None, **more: Any) -> LLM:
    store = Datastore.of(CORPUS, VOCABULARY) if datastore is None else datastore
    config = {"method": "retrieval", "num_speculative_tokens": 6, "datastore": store, **more}
    return LLM(target("llama"), tokenizer=tokenizer, speculative_config=config, max_num_seqs=4,
               max_model_len=CONTEXT)  # fmt: skip


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
    llm = decoder(tree=tree, verify=rule)
    outputs = llm.generate(PROMPTS, greedy(LENGTH))
    assert ids(outputs) == EXPECTED
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > LENGTH
    assert ids(llm.generate(PROMPTS[2:3], greedy(LENGTH))) == EXPECTED[2:3]


def test_the_most_frequent_continuations_are_drafted() -> None:
    store = Datastore.of([[5, 6, 7, 8], [9, 5, 6, 7, 9], [5, 6, 10], [6, 11]], VOCABULARY)
    rounds = drafted(decoder(store, num_speculative_tokens=3), [1, 5, 6], greedy(6))
    assert rounds[0] == [[7, 10, 8], [0, 0, 1]]
    chain = decoder(store, tree=False, num_speculative_tokens=3)
    assert drafted(chain, [1, 5, 6], greedy(6))[0] == [[7, 8], [0, 1]]
    sure = decoder(store, min_token_prob=0.6)
    assert drafted(sure, [1, 5, 6], greedy(6))[0] == [[7], [0]]
    assert drafted(decoder(store), [1, 12, 6], greedy(6))[0] == [[], []]
    short = decoder(store, min_token_span=1, max_token_span=1)
    assert sorted(drafted(short, [1, 5, 6], greedy(6))[0][0][:3]) == [7, 10, 11]


def test_a_datastore_on_disk_with_the_targets_tokenizer(tmp_path: Path) -> None:
    words = word_tokenizer()
    Datastore.of(CORPUS, VOCABULARY, "words", fingerprint_of(words)).save(tmp_path / "d")
    llm = decoder(str(tmp_path / "d"), words)
    assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == EXPECTED
    assert llm.memory["drafter_cache"] == Datastore.open(tmp_path / "d").nbytes
    words.add_tokens(["w64"])
    with pytest.raises(VocabularyMismatch, match="another tokenizer"):
        decoder(str(tmp_path / "d"), words)
    with pytest.raises(VocabularyMismatch, match="no tokenizer"):
        decoder(str(tmp_path / "d"))


@pytest.mark.parametrize(
    ("options", "said"),
    [({"datastore": 3}, "datastore"), ({"datastore": "nowhere"}, "is no datastore"),
     ({"min_token_span": 0}, "min_token_span"), ({"max_token_span": 33}, "max_token_span"),
     ({"min_token_prob": 2}, "min_token_prob"), ({"tree": 1}, "tree")],
)  # fmt: skip
def test_bad_options_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decoder(**options)
    with pytest.raises(ConfigError, match="needs 'datastore'"):
        LLM(target("llama"), speculative_config={"method": "retrieval"})
