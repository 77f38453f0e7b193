"""Texts at the edges of a buffer, a context or a round, where an off-by-one error hides.

Each text is checked against plain forwards of the target that use no cache at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from devices import on_device
from outpace import LLM, SamplingParams
from outpace.core.proposal import Proposal
from outpace.draft.base import Rows
from outpace.methods.models.window import reserve
from outpace.targets.base import ScoreInputs
from outpace.targets.hf.runner import Runner
from targets.families import build, noised

CONTEXT = 512
DRAFTER_CONTEXT = 24
CONFIGS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "draft_model": {"num_speculative_tokens": 3},
    "draft_tree": {"method": "draft_tree", "branching": [2, 2], "num_speculative_tokens": 6},
}


@cache
def target(positions: int = CONTEXT) -> Any:
    """A model with room for texts of several hundred tokens."""
    return build("llama", max_position_embeddings=positions)


@cache
def small_drafter(positions: int = CONTEXT) -> Any:
    """A drafter that is right some of the time."""
    model = noised(target(), 0.05)
    model.config.max_position_embeddings = positions
    return model


def engine(method: str, rows: int = 3, positions: int = CONTEXT, **options: Any) -> LLM:
    config = {**CONFIGS[method], **options}
    if method.startswith("draft"):
        config["model"] = small_drafter(positions)
    return LLM(target(), speculative_config=config, max_num_seqs=rows)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


@torch.inference_mode()
def first_wrong_token(prompt: Sequence[int], text: Sequence[int]) -> int | None:
    """Returns where a text leaves plain greedy decoding, None where it does not."""
    ids = on_device([[*prompt, *text]])
    logits = target()(input_ids=ids, use_cache=False).logits[0]
    expected = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    pairs = enumerate(zip(text, expected, strict=True))
    return next((at for at, (found, best) in pairs if found != best), None)


# -- the cache grows ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", CONFIGS)
@torch.inference_mode()
def test_a_text_that_outgrows_the_first_buffers_keeps_every_slot(method: str) -> None:
    """Log-probabilities feel a single lost slot at once; an argmax may survive it for long."""
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=300, ignore_eos=True, logprobs=0)
    for prompt, output in zip(prompts, engine(method).generate(prompts, params), strict=True):
        text = output.token_ids
        assert len(text) == 300
        ids = on_device([[*prompt, *text]])
        probs = target()(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        for at, token in enumerate(text):
            reported = output.outputs[0].logprobs[at][token].logprob
            expected = float(probs[len(prompt) - 1 + at, token])
            assert reported == pytest.approx(expected, abs=1e-4), f"token {at}"


@pytest.mark.parametrize("method", ["draft_model", "draft_tree"])
def test_a_long_greedy_text_is_that_of_plain_forwards(method: str) -> None:
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    for prompt, output in zip(prompts, engine(method).generate(prompts, greedy(320)), strict=True):
        assert len(output.token_ids) == 320
        assert first_wrong_token(prompt, output.token_ids) is None


# -- prompts of two tokens ------------------------------------------------------------------------


def test_the_path_of_a_tree_is_moved_from_behind_all_pending_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two prompts of two tokens are read in the pass of the first round: two tokens are pending
    when the accepted path of its tree is moved."""
    moved = []
    advance = Runner.advance_paths

    def watched(self: Runner, pending: int, paths: Sequence[Sequence[int]]) -> None:
        moved.extend(pending for path in paths if list(path) != list(range(1, len(path) + 1)))
        advance(self, pending, paths)

    monkeypatch.setattr(Runner, "advance_paths", watched)
    llm = engine("draft_tree", branching=[3, 2], num_speculative_tokens=9)
    for first in range(0, 24, 2):
        prompts = [[first, first + 1], [first + 20, first]]
        for prompt, output in zip(prompts, llm.generate(prompts, greedy(16)), strict=True):
            assert first_wrong_token(prompt, output.token_ids) is None, prompt
    assert moved.count(2) >= 3, "no path was moved while two tokens were pending"


# -- a contradiction at the root ------------------------------------------------------------------


class GivesUpAfter:
    """A logits processor that forbids every token once n have been generated."""

    def __init__(self, tokens: int, prompt: Sequence[int]) -> None:
        self._limit = len(prompt) + tokens

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores.fill_(float("-inf")) if ids.shape[1] >= self._limit else scores


@pytest.mark.parametrize("method", ["draft_model", "draft_tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_contradiction_at_the_root_takes_back_what_the_drafter_read(
    method: str, temperature: float
) -> None:
    """The round is undone for all rows, and begun again by those that are left."""
    prompts = [[1, 2, 3], [4, 5], [6]]
    llm = engine(method)
    asked = [
        SamplingParams(temperature=temperature, seed=row, max_tokens=12, ignore_eos=True)
        for row in range(3)
    ]
    expected = [output.token_ids for output in llm.generate(prompts, asked)]
    rounds_undone = 0
    for tokens in range(5):
        broken = SamplingParams(
            temperature=temperature, seed=1, max_tokens=12, ignore_eos=True,
            logits_processors=[GivesUpAfter(tokens, prompts[1])],
        )  # fmt: skip
        score, commit = llm.engine.target.score, llm.engine.target.commit
        with pytest.MonkeyPatch.context() as patch:

            def scored(plan: ScoreInputs, score: Any = score) -> Any:
                nonlocal rounds_undone
                rounds_undone += 1
                return score(plan)

            def committed(paths: Any, commit: Any = commit) -> None:
                nonlocal rounds_undone
                rounds_undone -= 1
                commit(paths)

            patch.setattr(llm.engine.target, "score", scored)
            patch.setattr(llm.engine.target, "commit", committed)
            found = llm.generate(prompts, [asked[0], broken, asked[2]])
        assert found[1].finish_reason == "error"
        assert [found[0].token_ids, found[2].token_ids] == [expected[0], expected[2]], tokens
    assert rounds_undone >= 2, "no contradiction stood at the root"


# -- a drafter with a smaller context -------------------------------------------------------------


@pytest.mark.parametrize("method", ["draft_model", "draft_tree"])
def test_a_drafter_fills_its_context_and_then_moves_its_window(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(method, positions=DRAFTER_CONTEXT)
    drafter = llm.engine.drafter
    propose = drafter.propose
    ends: list[int] = []
    fed: list[int] = []

    def watched(rows: Rows, budgets: Sequence[int]) -> Proposal:
        proposal = propose(rows, budgets)
        fed.extend(drafter.runner.lengths)
        for row, count in enumerate(proposal.counts.tolist()):
            if count:
                depth = int(proposal.tree.depth[row, : count + 1].max())
                ends.append(rows.lengths[row] + depth)
        return proposal

    monkeypatch.setattr(drafter, "propose", watched)
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8]]
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(40)), strict=True):
        assert first_wrong_token(prompt, output.token_ids) is None
    assert max(ends) > DRAFTER_CONTEXT, "it stopped drafting where its context was full"
    most = DRAFTER_CONTEXT - reserve(DRAFTER_CONTEXT)  # tokens of a text
    # The last token of a draft is drawn and not fed.
    assert most - 4 <= max(fed) < most + 4
