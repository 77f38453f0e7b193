"""A drafter that knows a part of the target's tokens, where the options allow none of that part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outpace import LLM, SamplingParams
from outpace.core.logits_pipeline import (
    Branches,
    Contradiction,
    History,
    LogitsPipeline,
    RowOptions,
)
from outpace.heads.base import TargetShape
from outpace.heads.registry import find_head
from outpace.targets.hf.loading.loaded import LoadedModel
from targets.families import VOCABULARY, build, target

KNOWN = VOCABULARY // 2
PROMPTS = [[1, 2, 3], [4, 5], [6]]
DYNAMIC = {"branching": "dynamic"}
CONFIGS: dict[str, dict[str, Any]] = {
    "a tree of a head": {"method": "medusa"},
    "a dynamic tree of a head": {"method": "eagle3", **DYNAMIC},
    "a chain of a head": {"method": "diffusion"},
    "a chain": {"method": "draft_model"},
    "a tree": {"method": "draft_tree", "branching": [2, 1]},
    "a dynamic tree": {"method": "draft_tree", **DYNAMIC},
    "a guessed chain": {"method": "staged"},
    "two": {"method": "ensemble", "combine": "merge"},
}


def small(method: str) -> Any:
    """A head or a draft model with the first half of the target's tokens."""
    if method.startswith(("draft", "staged")):
        return LoadedModel(build("llama", vocab_size=KNOWN), None, "a small one", same_tokens=True)
    kind, model = find_head(method), target("llama")
    torch.manual_seed(1)
    shape = TargetShape.of(model.config, "a small one")
    head = kind(shape, kind.Config(depths=3, draft_vocab_size=KNOWN)).to(torch.float64)
    head.d2t.copy_(torch.arange(KNOWN))
    return head.eval().requires_grad_(False)


def decoder(config: dict[str, Any] | None) -> LLM:
    if config is None:
        return LLM(target("llama"), max_num_seqs=3)
    config = {"num_speculative_tokens": 4, **config}
    if config["method"] == "ensemble":
        config["drafters"] = [
            {"method": method, "model": small(method)} for method in ("draft_model", "medusa")
        ]
    else:
        config["model"] = small(config["method"])
    return LLM(target("llama"), speculative_config=config, max_num_seqs=3)


def forbids_the_known(ids: Tensor, scores: Tensor) -> Tensor:
    """After an even number of tokens, all that the drafter knows."""
    if ids.shape[1] % 2 == 0:
        scores[:, :KNOWN] = -torch.inf
    return scores


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_goes_on(name: str, temperature: float) -> None:
    def asked(seed: int, **more: Any) -> SamplingParams:
        return SamplingParams(
            temperature=temperature, seed=seed, max_tokens=8, ignore_eos=True, **more
        )

    unknown = list(range(KNOWN, VOCABULARY))
    params = [
        asked(1, allowed_token_ids=unknown),
        asked(2, logits_processors=[forbids_the_known]),
        asked(3, allowed_token_ids=unknown, speculative="off"),
    ]
    found = decoder(CONFIGS[name]).generate(PROMPTS, params)
    assert [output.finish_reason for output in found] == ["length"] * 3
    assert min(found[0].token_ids) >= KNOWN
    if temperature == 0:
        expected = decoder(None).generate(PROMPTS, params)
        assert [output.token_ids for output in found] == [each.token_ids for each in expected]


def test_a_row_without_a_token_to_offer_drafts_nothing() -> None:
    resolved = SamplingParams(temperature=1.0, allowed_token_ids=[2, 3]).resolve({})
    distribution = LogitsPipeline([RowOptions(resolved)] * 2, vocabulary=4)
    logits = torch.zeros(2, 1, 4)
    logits[1, :, 2:] = -torch.inf
    given = logits, Branches.root(2), History([[0]] * 2, [[]] * 2)
    with distribution.drafting():
        assert distribution(*given)[1, 0].tolist() == [0.25] * 4
        assert distribution.limit_draft_counts([3, 3]) == [3, 0]
        with distribution.drafting():
            assert distribution.limit_draft_counts([3, 3]) == [3, 3], "another drafter has its own"
    assert distribution.limit_draft_counts([3, 3]) == [3, 3]
    with pytest.raises(Contradiction):
        distribution(*given)
