"""Consensus: whom the samples of a prompt ask, what they draft, and that they stay independent."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.test_distribution import FALSE_ALARM, exact, p_value
from outpace import LLM, SamplingParams
from outpace.core.logits_pipeline import History, LogitsPipeline, RowOptions
from outpace.core.request import Request
from outpace.draft.base import Rows
from outpace.errors import ConfigError
from outpace.methods.lookup.consensus import KEPT, ConsensusDrafter, ConsensusOptions
from targets.families import CONTEXT, PROMPTS, build, plain, target
from targets.generating import greedy, ids

LENGTH = 24
EXPECTED = plain("llama", LENGTH, tuple(map(tuple, PROMPTS)))
SAMPLED = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True)
PROMPT = [1, 2, 3]
TEMPERATURE = 2.0
PAIRS = 2000
Texts = tuple[tuple[int, ...], tuple[int, ...]]


def decoder(rows: int = 4, **more: Any) -> LLM:
    config = {"method": "consensus", "num_speculative_tokens": 6, **more}
    return LLM(target("llama"), speculative_config=config, max_num_seqs=rows, max_model_len=CONTEXT)


@pytest.mark.parametrize("tree", [False, True])
def test_samples_that_are_alike_draft_each_other(tree: bool) -> None:
    """Greedy samples are the same text: the ones that come later know it already."""
    llm = decoder(rows=1, tree=tree, max_token_span=64)
    (output,) = llm.generate([PROMPTS[2]], replace(greedy(LENGTH), n=3))
    assert [sample.token_ids for sample in output.outputs] == [EXPECTED[2]] * 3
    passes = [sample.metrics.num_target_passes for sample in output.outputs]
    assert max(passes[1:]) < passes[0]


def test_the_others_are_asked_only_without_a_seed() -> None:
    llm, prompt = decoder(tree=False), [5, 9, 7]
    alone = llm.generate([prompt], replace(SAMPLED, seed=3))[0].outputs[0]
    (output,) = llm.generate([prompt], replace(SAMPLED, seed=3, n=4))
    assert output.outputs[0].token_ids == alone.token_ids
    assert output.outputs[0].metrics == alone.metrics or (
        output.outputs[0].metrics.num_draft_tokens == alone.metrics.num_draft_tokens
    )


def test_a_sample_that_was_put_aside_has_one_vote() -> None:
    drafter = ConsensusDrafter(ConsensusOptions(max_token_span=4))
    options = RowOptions(SamplingParams().resolve({}))
    first, second = (Request([1, 2, 3], options, 0, 8, id=n, group="g") for n in (7, 8))
    drafter.begin([first, second])
    drafter.end([second])
    drafter.begin([second])
    assert len(drafter._groups["g"]) == 2


def test_the_majority_is_drafted_first() -> None:
    drafter = ConsensusDrafter(ConsensusOptions(max_token_span=4))
    texts = [[1, 2, 3, 7, 8], [1, 2, 3, 7, 9], [1, 2, 3, 4, 5], [1, 2, 3]]
    drafted = _drafts(drafter, texts, prompt=3)[3]
    assert drafted == [(7, 0), (4, 0), (8, 1), (9, 1), (5, 2)]
    chains = ConsensusDrafter(ConsensusOptions(max_token_span=4, tree=False))
    assert _drafts(chains, texts, prompt=3)[3] == [(7, 0), (8, 1)]


def test_a_prompt_has_one_vote() -> None:
    """What stands in the prompt of all samples is not told by each of them."""
    drafter = ConsensusDrafter(ConsensusOptions(min_token_span=1, min_token_prob=0.4))
    texts = [[5, 6, 1, 5], [5, 6, 1, 2, 5, 4], [5, 6, 1, 2, 2]]
    assert _drafts(drafter, texts, prompt=3)[0] == [(6, 0), (4, 0)]


def _drafts(
    drafter: ConsensusDrafter, texts: list[list[int]], prompt: int
) -> list[list[tuple[int, int]]]:
    """Returns each row's nodes, with their parents, where these are the samples of one prompt."""
    options = [RowOptions(SamplingParams(temperature=1).resolve({}))] * len(texts)
    requests = [
        Request(text[:prompt], one, 0, 64, id=number, group="all", output_ids=text[prompt:])
        for number, (text, one) in enumerate(zip(texts, options, strict=True))
    ]
    rows = Rows(
        History([text[:prompt] for text in texts], [text[prompt:] for text in texts]),
        LogitsPipeline(options, vocabulary=16),
        seeds=torch.zeros(len(texts), dtype=torch.long),
        requests=requests,
    )
    drafter.end([], interrupted=True)
    drafter.begin(requests)
    proposal = drafter.propose(rows, [8] * len(texts))
    pairs = zip(proposal.tokens.tolist(), proposal.tree.parents.tolist(), strict=True)
    counts = proposal.counts.tolist()
    return [
        list(zip(*pair, strict=True))[:count] for pair, count in zip(pairs, counts, strict=True)
    ]


def pairs_of_samples(llm: LLM, monkeypatch: pytest.MonkeyPatch, groups: int) -> Counter[Texts]:
    """Returns the first two tokens of two samples of a prompt. The second one begins when the first
    has its first token: from then on it is asked in every round."""
    monkeypatch.setattr("secrets.randbits", random.Random(5).getrandbits)
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=3, ignore_eos=True, n=2)
    found: Counter[Texts] = Counter()
    for _ in range(groups // 100):
        samples = [llm.input_processor.requests(PROMPT, params) for _ in range(100)]
        for first, _ in samples:
            llm.engine.add(first)
        llm.engine.step()
        assert all(len(first.output_ids) == 1 for first, _ in samples)
        for _, second in samples:
            llm.engine.add(second)
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
        found.update((_two(first), _two(second)) for first, second in samples)
    return found


def _two(request: Any) -> tuple[int, ...]:
    return tuple(request.output_ids[:2])


@pytest.mark.parametrize(
    ("rule", "tree", "independent"),
    [
        ("match", True, True),
        pytest.param("token", False, True, marks=pytest.mark.slow),
        ("typical", True, False),
    ],
)
def test_two_samples_of_a_prompt_are_independent(
    rule: str, tree: bool, independent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pairs follow the product of the distribution with itself; under a lossy rule, which keeps
    what another sample said where that is plausible, they do not."""
    model = build("llama", vocab_size=6, num_hidden_layers=1)
    config = {"method": "consensus", "min_token_span": 1, "tree": tree, "verify": rule}
    llm = LLM(
        model,
        speculative_config={**config, "num_speculative_tokens": 2},
        max_num_seqs=200,
    )
    drafted = 0

    def count(trace: Any) -> None:
        nonlocal drafted
        drafted += int(trace.proposal.counts.sum())

    with llm.engine.observing(count):
        found = pairs_of_samples(llm, monkeypatch, groups=PAIRS)
    assert drafted > PAIRS
    distribution: Counter[tuple[int, ...]] = Counter()
    for text, mass in exact(model, PROMPT, TEMPERATURE).items():
        distribution[text[:2]] += mass
    joint = {(a, b): distribution[a] * distribution[b] for a in distribution for b in distribution}
    value = p_value(found, joint)
    assert value > FALSE_ALARM if independent else value < 1e-6


def test_groups_that_have_ended_are_forgotten() -> None:
    llm = decoder(rows=2)
    sizes = []
    for _ in range(3 * KEPT):
        llm.generate([PROMPT], replace(SAMPLED, n=2, max_tokens=4))
        sizes.append(llm.memory["drafter_cache"])
    assert sizes[KEPT // 2] < 0.7 * sizes[KEPT]
    assert sizes[-1] == pytest.approx(sizes[KEPT], rel=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_token_span": 0}, "min_token_span must be at least 1"),
        ({"min_token_span": 9, "max_token_span": 8}, "must not be above max_token_span=8"),
        ({"min_token_prob": 2}, "min_token_prob must be"),
        ({"tree": "yes"}, "tree must be"),
        ({"verify": "token"}, "chains only"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decoder(**options)


def test_greedy_texts_are_the_targets_own() -> None:
    assert ids(decoder().generate(PROMPTS, greedy(LENGTH))) == EXPECTED
