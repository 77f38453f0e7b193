"""What a drafted level of a head reads of weights, by which seeded texts choose their lengths."""

from __future__ import annotations

from typing import Any

import pytest

from outpace import LLM
from outpace.heads.base import Head, TargetShape
from outpace.heads.registry import find_head
from targets.families import CONTEXT, target

SIZE, VOCABULARY = 32, 64


def level(method: str, **sizes: Any) -> int:
    """Returns the bytes for one level."""
    kind, model = find_head(method), target("llama")
    head: Head = kind(TargetShape.of(model.config), kind.Config(**sizes)).to(model.dtype)
    config = {"method": method, "model": head.eval().requires_grad_(False)}
    llm = LLM(model, speculative_config=config, max_model_len=CONTEXT)
    return llm.engine.drafter.pass_bytes


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("medusa", {}),
        ("ctc", {"frames": 8}),
        ("mlp_speculator", {"tied": False, "inner_size": SIZE}),
    ],
)
def test_more_depths_with_weights_of_their_own_do_not_make_each_dearer(
    method: str, sizes: dict[str, Any]
) -> None:
    assert level(method, depths=4, **sizes) <= level(method, depths=2, **sizes)


def test_the_depths_of_medusa_are_alike() -> None:
    output, block = VOCABULARY * SIZE, SIZE * SIZE + SIZE
    assert level("medusa", depths=3, blocks=2) == 8 * (output + 2 * block)


@pytest.mark.parametrize("method", ["eagle", "mtp", "dflash"])
def test_the_target_s_output_matrix_counts_as_a_copy_of_it_does(method: str) -> None:
    copied = level(method, depths=2, draft_vocab_size=VOCABULARY)
    assert level(method, depths=2) == copied
    assert copied > level(method, depths=2, draft_vocab_size=VOCABULARY // 2)


@pytest.mark.parametrize("method", ["dflash", "ctc"])
def test_a_pass_that_makes_all_depths_is_shared_by_them(method: str) -> None:
    sizes = {"frames": 12} if method == "ctc" else {}
    few, many = (level(method, depths=depths, **sizes) for depths in (2, 6))
    assert few == pytest.approx(3 * many, rel=0.01)
