"""One decoder that drafts with as many of its layers as it takes, for several targets."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace import LLM, SamplingParams
from outpace.draft.registry import find_drafter
from outpace.errors import ConfigError
from outpace.heads.base import TargetShape
from outpace.heads.layers import AttentionContext
from outpace.methods.heads.s2d import S2d, S2dConfig
from outpace.targets.hf.loading.loaded import LoadedModel
from targets.families import CONTEXT, PROMPTS, build, target
from targets.generating import greedy, ids


@lru_cache
def dummy_options() -> S2d:
    found: S2d = find_drafter("s2d").dummy_options(LoadedModel(target("llama"), None, "llama"))[
        "model"
    ]
    return found


def decoder(model: Any, **more: Any) -> LLM:
    config = {"method": "s2d", "model": dummy_options(), "num_speculative_tokens": 4, **more}
    return LLM(model, speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)


def three() -> S2d:
    """A decoder with three parts, of one, two and three layers."""
    torch.manual_seed(0)
    config = S2dConfig(width=16, layers=3, first=1, every=1)
    head = S2d(TargetShape(8, 20, 2), config).double().eval().requires_grad_(False)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head


def whole(head: S2d, tokens: Tensor) -> Tensor:
    """The outputs for a text that is read at once."""
    rows, count = tokens.shape
    none = torch.empty(rows, count, 0, dtype=torch.float64)
    return head.step(none, tokens, AttentionContext.causal(head.begin(rows), count), None)[0]  # type: ignore[arg-type]


def test_the_confidence_says_which_part_guesses() -> None:
    head, tokens = three(), torch.randint(20, (2, 9), generator=torch.Generator().manual_seed(1))
    parts = head.parts(tokens)
    head.confidence = 0.0
    assert torch.allclose(whole(head, tokens), parts[0], atol=1e-12)
    head.confidence = 1.0
    assert torch.allclose(whole(head, tokens), parts[2], atol=1e-12)
    best = head.logits(parts[0], None).softmax(-1).amax(-1)  # type: ignore[arg-type]
    head.confidence = float(best.median())
    mixed, sure = whole(head, tokens), best >= head.confidence
    assert torch.allclose(mixed[sure], parts[0][sure], atol=1e-12)
    assert not torch.isclose(mixed[~sure], parts[0][~sure]).all(-1).any()


def test_layers_that_nobody_needs_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    head, tokens, calls = three(), torch.randint(20, (1, 4)), []
    for number, layer in enumerate(head.stack):
        layer.register_forward_hook(lambda *given, number=number: calls.append(number))
    for confidence, wanted in ((0.0, [0]), (1.0, [0, 1, 2])):
        head.confidence = confidence
        calls.clear()
        whole(head, tokens)
        assert calls == wanted


def test_it_serves_targets_of_any_width() -> None:
    for model in (target("llama"), build("qwen3", hidden_size=48, num_hidden_layers=3)):
        plain = LLM(model, max_num_seqs=4, max_model_len=CONTEXT).generate(PROMPTS, greedy(12))
        assert ids(decoder(model).generate(PROMPTS, greedy(12))) == ids(plain)
    with pytest.raises(ConfigError, match="vocab_size is 64, and this target's is 72"):
        decoder(build("llama", vocab_size=72))


def test_the_confidence_is_an_option_of_each_drafter() -> None:
    small, large = decoder(target("llama"), confidence=0), decoder(target("llama"), confidence=1)
    assert (small.engine.drafter.head.confidence, large.engine.drafter.head.confidence) == (0, 1)
    assert dummy_options().confidence == 0.4
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
    together = ids(small.generate(PROMPTS, sampled))
    assert ids(small.generate([PROMPTS[2]], sampled))[0] == together[2]
    for wrong in (1.5, "high", True):
        with pytest.raises(ConfigError, match="confidence must be a number in"):
            decoder(target("llama"), confidence=wrong)


@pytest.mark.parametrize("sizes", [{"first": 4}, {"every": 3}, {"width": 0}, {"confidence": 2.0}])
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"parts|width|confidence"):
        S2dConfig(**{"layers": 3, "first": 1, "every": 1, **sizes})
