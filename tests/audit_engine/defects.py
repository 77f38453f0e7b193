"""Bugs of other engines, each put into this one by a switch, to see that the gate catches them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.audit_engine import mutations as m
from tests.audit_engine.pairs import PROMPTS

from outpace import LLM


@dataclass(frozen=True)
class Defect:
    """A bug: where it bites, how it gets in, and which audits object."""

    name: str
    patch: m.Patch
    caught_by: tuple[str, ...]
    """Some of "text", "drafts", "contract" (all three: `audit model`), "diff", "options". The first
    is what the fast test runs. Empty: harmless to exactness, so that nobody may object."""
    setup: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    prompts: Sequence[Sequence[int]] = PROMPTS
    """What "text", "drafts", "contract" and "diff" run on. ("options" has prompts of its own.)"""
    samples: int = 600
    """Texts that "text" has to object within; it stops at the first alarm. Chosen so that other
    seeds than the test's are enough, too."""

    @contextmanager
    def into(self, *engines: LLM) -> Iterator[None]:
        """Puts the bug into engines that were built without it (many a bug would not survive the
        probe at load)."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            for llm in engines:
                self.patch(monkeypatch, llm)
            yield


TREE = {"method": "draft_tree", "branching": [2, 2], "tokens": 6}
WINDOWED_TREE = {**TREE, "family": "mistral"}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
STOPPING = {"stop": ["a", "b", "c", "d"]}
OF_TWO_TOKENS = [[token, token + 1] for token in range(8)]
ALL = ("diff", "text", "options")
DEFECTS = [
    Defect("cache one short after full acceptance", m.cache_off_by_one, ALL, {"noise": 0.005},
           samples=4000),
    Defect("rejected tokens stay in the cache", m.not_rolled_back, ALL),
    Defect("accepted path of a tree not moved", m.path_not_moved, ALL, TREE),
    Defect("path of a tree taken one slot early", m.path_moved_early, ("diff", "options"), TREE,
           prompts=OF_TWO_TOKENS),
    Defect("last slot lost when buffers grow", m.last_slot_lost, ("diff",)),
    Defect("texts go on after a dead end", m.dead_ends_unseen, ("options",)),
    Defect("a dead end beside the path ends the text", m.any_dead_end_ends, ("options",)),
    Defect("rows take the slots of those that finished", m.rows_keep_their_numbers, ALL),
    Defect("siblings see each other", m.siblings_seen, ALL, TREE),
    Defect("positions by slot, not depth", m.positions_by_slot, ALL, TREE),
    Defect("sliding window counted in slots", m.window_in_slots, ALL, WINDOWED_TREE),
    Defect("one stream for all rows", m.shared_streams, ("text", "options")),
    Defect("draft stream keyed by place", m.reused_draft_stream, ("drafts",), {"verify": "block"}),
    Defect("one seed for all n texts", m.one_seed_for_n, ("options",)),
    Defect("coupled noise keyed by round", m.noise_by_round, ("diff", "options"),
           {"verify": "coupled"}),
    Defect("stop strings looked for per block", m.strings_at_block_ends, ("contract", "options"),
           params=STOPPING),
    Defect("tokens after the end", m.beyond_the_end, ("contract", "options")),
    Defect("padded vocabulary rows not cut", m.padding_not_cut, ("contract", "options"),
           NGRAM),
    Defect("penalties stale within a block", m.stale_penalties, ALL,
           params={"frequency_penalty": 2.0, "repetition_penalty": 1.5}),
    Defect("min_p ignored", m.min_p_ignored, ("options",), params={"min_p": 0.3}),
    Defect("replacement drawn at the next position", m.next_position, ("text",)),
    Defect("argmax at any temperature", m.greedy_at_any_temperature, ("text",)),
    Defect("bonus from the unwarped distribution", m.unwarped_bonus, ("text",), {"noise": 0.05},
           {"temperature": 0.5}),
    Defect("second-best token, plainly too", m.second_best, ("diff", "options")),
    Defect("penalties of the neighbouring row, plainly too", m.neighbours_history,
           ("diff", "options"), params={"frequency_penalty": 2.0, "repetition_penalty": 1.5}),
    Defect("log-probabilities of the raw distribution", m.raw_logprobs, ("options",)),
    Defect("argmax told as a sample", m.argmax_told_as_sample, ("drafts", "text")),
    Defect("drafter colder than its q", m.colder_than_told, ("drafts", "text")),
    Defect("unlikely drafted tokens dropped", m.unlikely_dropped, ("drafts", "text")),
    Defect("better of two chains kept", m.better_of_two, ("drafts", "text")),
    Defect("siblings told as independent draws", m.told_with_replacement, ("drafts",),
           {**TREE, "branching": [3, 1]}),
    Defect("draft cache not rolled back", m.draft_cache_not_rolled_back, ()),
    Defect("drafter beyond its context", m.beyond_its_context, ("contract",),
           {"drafter_context": 12}),
    Defect("drafter beyond its budget", m.beyond_its_budget, ("contract",)),
    Defect("tree drafter beyond its context", m.beyond_its_context, ("contract",),
           {**TREE, "drafter_context": 12}),
]  # fmt: skip
