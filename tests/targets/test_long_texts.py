"""Texts that outgrow their slots, in batches whose rows come and go: those that rows give alone."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from devices import on_device
from outpace import LLM
from outpace.core.trees.tree import Tree
from outpace.targets.hf.cache import SlotCache
from outpace.targets.hf.runner import Runner
from outpace.targets.hf.slot_ranges import SLOT_GRANULARITY
from representatives import representatives

from .families import VOCABULARY, build, noised
from .generating import greedy, ids

CONTEXT = 1024
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"num_speculative_tokens": 4},
    "draft_model": {"num_speculative_tokens": 3},
    "draft_tree": {"num_speculative_tokens": 6, "branching": [2, 2]},
}


@cache
def model(family: str) -> Any:
    """Returns the family's tiny model, with room for longer texts."""
    more = {"n_positions": CONTEXT} if family == "gpt2" else {}
    return build(family, max_position_embeddings=CONTEXT, **more)


@cache
def drafter(family: str) -> Any:
    return noised(model(family), 0.02)


def decoder(family: str, method: str, rows: int) -> LLM:
    config: dict[str, Any] = {"method": method, **METHODS[method]}
    if method.startswith("draft"):
        config["model"] = drafter(family)
    return LLM(model(family), speculative_config=config, max_num_seqs=rows, max_model_len=CONTEXT)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


@cache
def alone(family: str, length: int, seed: int, tokens: int) -> list[int]:
    """Returns what transformers' own greedy generate writes."""
    given = on_device([prompt(length, seed)])
    made = model(family).generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return made[0, length:].tolist()  # type: ignore[no-any-return]


@pytest.fixture
def spacings(monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Whether the rows of passes over several rows were at equal distances."""
    seen: set[bool] = set()
    real = SlotCache.placement

    def placement(self: SlotCache, first: int, count: int) -> Any:
        found = real(self, first, count)
        if count > 1:
            seen.add(found.spacing is not None)
        return found

    monkeypatch.setattr(SlotCache, "placement", placement)
    return seen


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("family", "length"), [("llama", 250), ("gemma3", 506)])
def test_a_text_outgrows_its_slots(family: str, length: int, method: str) -> None:
    llm = decoder(family, method, rows=1)
    found = ids(llm.generate([prompt(length, 1)], greedy(16)))
    assert found == [alone(family, length, 1, 16)]
    assert llm.engine.target.runner.cache.longest == 0
    assert (
        llm.engine.target.runner.cache.capacity > -(-length // SLOT_GRANULARITY) * SLOT_GRANULARITY
    )


@pytest.mark.parametrize("method", METHODS)
def test_rows_outgrow_their_slots_one_by_one(method: str, spacings: set[bool]) -> None:
    lengths = [800, 250, 3, 254, 2]
    found = decoder("llama", method, rows=5).generate(
        [prompt(length, row) for row, length in enumerate(lengths)], greedy(16)
    )
    assert ids(found) == [alone("llama", length, row, 16) for row, length in enumerate(lengths)]
    assert False in spacings, "a long row among short ones"


@pytest.mark.parametrize(
    ("family", "method"),
    representatives(
        itertools.product(["llama", "gpt2", "mistral", "gemma2"], METHODS),
        lambda family, method: family == "llama" or method == "draft_model",
    ),
)
def test_rows_that_come_and_go_leave_the_others_alone(
    family: str, method: str, spacings: set[bool]
) -> None:
    lengths, tokens = [2, 300, 5, 1, 40, 2, 7], [12, 4, 9, 14, 3, 8, 6]
    asked = [greedy(count) for count in tokens]
    found = decoder(family, method, rows=3).generate(
        [prompt(length, row) for row, length in enumerate(lengths)], asked
    )
    assert ids(found) == [
        alone(family, length, row, tokens[row]) for row, length in enumerate(lengths)
    ]
    assert spacings == {True, False}


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@torch.inference_mode()
def test_a_tree_behind_two_pending_tokens_is_committed(family: str, uneven: bool) -> None:
    texts = [prompt(length, length) for length in (250, 9, 30)]
    runner = Runner(model(family), rows=4, max_length=CONTEXT)
    runner.admit(4)
    runner.prefill(0, [texts[0], texts[1], [1], texts[2]])
    runner.retain([0, 1, 3] if uneven else [0, 1, 2])
    if not uneven:
        texts.pop(2)
        runner.retain([0, 1])
    rows = len(texts)
    tree = Tree.uniform([0, 0, 1, 2, 2, 4], rows=rows)
    path = [2, 4, 6]
    for seed in range(3):
        fed = [prompt(2 + tree.size, 100 * seed + row) for row in range(rows)]
        logits = runner.forward(torch.tensor(fed), keep=1 + tree.size, tree=tree).logits
        runner.advance_paths(2, [path[: row + 1] for row in range(rows)])
        for row in range(rows):
            pending, nodes = fed[row][:2], fed[row][2:]
            along = [*texts[row], *pending, *(nodes[node - 1] for node in path)]
            plain = model(family)(input_ids=on_device([along])).logits[0, -len(path) - 1 :]
            assert (logits[row, [0, *path]] - plain).abs().max() < 1e-5 * plain.std()
            texts[row] = along[: len(along) - len(path) + row + 1]
        assert runner.lengths == [len(text) for text in texts]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_prompts_of_two_tokens_are_read_with_the_first_tree(family: str) -> None:
    found = decoder(family, "draft_tree", rows=2).generate(
        [prompt(2, seed) for seed in (1, 2)], greedy(20)
    )
    assert ids(found) == [alone(family, 2, seed, 20) for seed in (1, 2)]
