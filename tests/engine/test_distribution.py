"""The distribution of what comes out of the whole engine, by one seeded statistical test.

Enumeration proves the rules; this tests the wiring of the random streams. 1,600 texts of three
tokens are compared with their exact distribution by a chi-square test. The seeds are fixed, so that
the test never flickers; for a right implementation and other seeds it would fail one time in
10,000.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy import stats

from devices import on_device
from outpace import LLM, SamplingParams
from outpace.core.trees.tree_shape import TreeShape
from outpace.policy.lengths.adaptive import Constant
from targets.families import build, noised

VOCABULARY = 6
PROMPTS = [[1, 2, 3], [4]]
SEEDS = 800
FALSE_ALARM = 1e-4


def exact(
    model: torch.nn.Module, prompt: list[int], temperature: float
) -> dict[tuple[int, ...], float]:
    """The distribution of the next three tokens."""

    def after(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(on_device([ids])).logits[0, -1]
        return (logits / temperature).softmax(-1)

    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        distribution = {
            (*text, token): mass * float(share)
            for text, mass in distribution.items()
            for token, share in enumerate(after([*prompt, *text]))
        }
    return distribution


def p_value(found: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]) -> float:
    """Chi-square, with all texts that are expected fewer than five times counted as one."""
    count = found.total()
    common = [text for text, mass in distribution.items() if mass * count >= 5]
    observed = [found[text] for text in common]
    expected = [distribution[text] * count for text in common]
    rest = count - sum(expected)
    if rest >= 1:
        observed, expected = [*observed, count - sum(observed)], [*expected, rest]
    assert len(observed) > 20, "the distribution should have many likely texts"
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)


@pytest.mark.parametrize(
    ("method", "verify"),
    [
        ("draft_model", "token"),
        ("usual tokens", "token"),
        ("draft_tree", "recursive"),
        ("grown tree", "recursive"),
    ],
)
def test_texts_of_three_tokens_follow_the_targets_distribution(method: str, verify: str) -> None:
    model = build("llama", vocab_size=VOCABULARY, num_hidden_layers=1)
    config = {
        "method": {"usual tokens": "draft_model", "grown tree": "draft_tree"}.get(method, method),
        "model": noised(model, 0.4),
        "num_speculative_tokens": 2,
        "verify": verify,
    }
    if method == "usual tokens":
        config |= {"draft_vocab_size": VOCABULARY - 2}
    if method == "draft_tree":
        config |= {"branching": [2, 2], "num_speculative_tokens": 6}
    llm = LLM(model, speculative_config=config, max_num_seqs=400)
    if method == "grown tree":  # neither level by level nor with as many children everywhere
        llm.engine.controller = Constant(5, shape=TreeShape((0, 1, 0, 1, 0)))
    temperature = 2.0
    found: list[Counter[tuple[int, ...]]] = [Counter() for _ in PROMPTS]
    accepted = drafted = 0
    for begin in range(0, SEEDS, 200):
        seeds = [seed for seed in range(begin, begin + 200) for _ in PROMPTS]
        options = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=3, ignore_eos=True)
            for seed in seeds
        ]
        for place, output in enumerate(llm.generate(PROMPTS * 200, options)):
            found[place % 2][tuple(output.token_ids)] += 1
            accepted += output.metrics.num_accepted_tokens
            drafted += output.metrics.num_draft_tokens
    assert 0.2 < accepted / drafted < 0.95, "both acceptance and rejection should be common"
    for prompt, counts in zip(PROMPTS, found, strict=True):
        assert p_value(counts, exact(model, prompt, temperature)) > FALSE_ALARM / len(PROMPTS)
