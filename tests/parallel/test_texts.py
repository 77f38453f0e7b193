"""Two processes that hold a model together write what one writes that holds all of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from alike import LENGTH, METHODS, MODELS, llms, same, written
from engine.texts import SIZE, tokenizer, writer
from outpace import LLM, SamplingParams
from outpace.core.proposal import AuxTokens
from outpace.core.trees.tree import Tree
from outpace.draft.registry import find_drafter
from outpace.errors import ConfigError
from outpace.targets.base import PromptInputs, ScoreInputs, Scores, Target
from outpace.targets.hf.loading.loaded import LoadedModel, probe_states
from outpace.targets.hf.prefixes import PrefixStore
from outpace.targets.hf.target import HFTarget
from outpace.targets.parallel.leader import Leader
from outpace.targets.parallel.load import SplitModel
from outpace.targets.parallel.processes import Processes
from targets.families import CONTEXT, PROMPTS, VOCABULARY, build, drafter, target
from targets.generating import greedy, ids

from .following import following, split

EVEN = SIZE + 1
"""Tokens that two processes share evenly, as older versions of transformers have it."""


@pytest.fixture(scope="module")
def both() -> Iterator[Processes]:
    with following() as (found, _):
        yield found


@pytest.fixture(scope="module")
def llama(both: Processes, tmp_path_factory: pytest.TempPathFactory) -> SplitModel:
    return split(both, target("llama"), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(name: str, both: Processes, tmp_path: Path) -> None:
    one = build(name.partition(",")[0], **MODELS[name])
    two = split(both, one, tmp_path)
    weights = list(two.model.parameters())
    held = sum((w.to_local() if isinstance(w, DTensor) else w).numel() for w in weights)
    assert held < 0.6 * sum(weight.numel() for weight in weights), "it is not split"
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    pair = llms(one, two, speculative_config=config)
    same(pair)
    for what in ("pass_bytes", "lm_head_bytes", "weight_bytes"):  # seeded texts depend on the first
        assert getattr(pair[0].engine.target, what) == getattr(pair[1].engine.target, what)
    same(llms(one, two, speculative_config={**config, "verify": "coupled"}))


@pytest.mark.parametrize("method", METHODS)
def test_every_way_to_draft(method: str, llama: SplitModel) -> None:
    dummy_options = find_drafter(method).dummy_options(LoadedModel(target("llama"), None, "llama"))
    config = {"method": method, "num_speculative_tokens": 4, **dummy_options}
    if method == "none":
        config = {"method": method}
    pair = llms(target("llama"), llama, speculative_config=config)
    same(pair)
    if method != "none":
        found = pair[1].generate(PROMPTS, greedy(LENGTH))
        assert sum(output.metrics.num_draft_tokens for output in found)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_each_process_rounds_the_keys_and_values_of_its_heads(kind: str, llama: SplitModel) -> None:
    pair = llms(
        target("llama"), llama, kv_cache_dtype=kind, speculative_config={"method": "suffix"}
    )
    same(pair)
    one, other = (llm.engine.target.forward_uncached([5, 6, 7, 8], 2) for llm in pair)
    torch.testing.assert_close(other, one)


@pytest.mark.parametrize("method", ["layer_skip", "early_exit"])
def test_parts_of_the_target_draft_for_none_that_is_split(method: str, llama: SplitModel) -> None:
    dummy_options = find_drafter(method).dummy_options(LoadedModel(target("llama"), None, "llama"))
    with pytest.raises(ConfigError, match="split over 2 processes, and cannot"):
        LLM(llama, speculative_config={"method": method, **dummy_options}, max_model_len=CONTEXT)


def test_samples_fork_and_texts_that_were_put_aside_come_back(llama: SplitModel) -> None:
    config = {"method": "draft_model", "model": drafter("llama"), "num_speculative_tokens": 3}
    options = {"max_batch_total_tokens": 128, "max_num_batched_tokens": 6}
    pair = llms(target("llama"), llama, speculative_config=config, **options)
    several = SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=24, ignore_eos=True)
    same(pair, several, [prompt * 4 for prompt in PROMPTS[:2]])


def test_a_text_goes_on_from_what_is_cached(llama: SplitModel) -> None:
    prompt = [(7 * at) % VOCABULARY for at in range(40)]
    config = {"method": "ngram"}
    pair = llms(target("llama"), llama, speculative_config=config, enable_prefix_caching=True)
    found = []
    for llm in pair:
        first = written(llm, prompt)
        second = written(llm, [*prompt, *first.output_ids, 5, 6])
        llm.forget_texts()
        third = written(llm, prompt)
        texts = (first, second, third)
        found.append([(text.output_ids, text.cached_tokens) for text in texts])
    assert found[0] == found[1]
    assert [cached > 0 for _, cached in found[0]] == [False, True, False]


def test_forms_beams_and_text(both: Processes, tmp_path: Path) -> None:
    model = writer(EVEN)
    two, one = split(both, model, tmp_path, tokenizer()), LoadedModel(model, tokenizer(), "writer")
    pair = llms(one, two, speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    found = []
    for llm in pair:
        formed = written(llm, "go: ", structured_outputs={"regex": "[a-c]{3,9}x"})
        beams = llm.beam_search("go: ", {"beam_width": 3, "max_tokens": 6})[0]
        found.append([formed.text, [text.text for text in beams.sequences]])
    assert found[0] == found[1]


# -- the target itself -----------------------------------------------------------------------------


@torch.inference_mode()
def scored(target: Target, layers: frozenset[int]) -> list[Tensor]:
    """What a target says of two rows, one with a fork, in chains and in trees, with auxiliary
    tokens and with states."""
    found: list[Tensor] = []

    def note(scores: Scores) -> None:
        found.extend(
            [
                scores.logits,
                *(scores.hidden_states[layer] for layer in sorted(scores.hidden_states)),
            ]
        )

    for prompt in ([3, 1, 4, 1, 5], [9, 2, 6]):
        target.admit(PromptInputs(prompt))
    while target.num_ready_rows < target.num_rows:
        found += [
            part.hidden_states[layer]
            for part in target.prefill(3, layers)
            for layer in sorted(layers)
        ]
    target.fork(0)
    tokens = torch.tensor([[7, 8, 9], [1, 2, 3], [4, 4, 4]])
    tree = Tree.uniform([0, 0, 1], 3)
    note(target.score(ScoreInputs([[5], [6], [5]], tokens, tree, layers=layers)))
    target.commit([[1, 3], [2], []])
    aux = AuxTokens(torch.tensor([[0, 4]] * 3), tokens=torch.tensor([[5, 6]] * 3))
    scores = target.score(ScoreInputs([[1], [2], [3]], tokens, Tree.chain(3, 3), aux, layers))
    note(scores)
    assert scores.aux_logits is not None
    found.append(scores.aux_logits)
    target.commit([[1, 2, 3], [1], []])
    target.retain([1, 2])
    note(target.score(ScoreInputs([[1], [2]], tokens[:2], Tree.chain(2, 3))))
    target.reset()
    found.append(target.forward_aux([1, 2, 3], AuxTokens(aux.parents[:1] * 0, aux.tokens[:1])))
    return found


def test_a_split_target_scores_as_a_whole_one(llama: SplitModel) -> None:
    model, layers = target("llama"), frozenset({0, 1, -1})
    one = HFTarget(model, 3, CONTEXT, saved=PrefixStore(2))
    two = Leader(llama, 3, CONTEXT, saved=(2, None))
    for left, right in zip(scored(one, layers), scored(two, layers), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-9)
    for each in (two, two.new_target(1)):
        assert (each.num_rows, each.num_ready_rows, list(each.lengths)) == (0, 0, [])


@torch.inference_mode()
def test_what_is_asked_of_the_model_itself(llama: SplitModel) -> None:
    one, two = HFTarget(target("llama"), 1, CONTEXT), Leader(llama, 1, CONTEXT)
    tokens, states = torch.tensor([[1, 2, 3]]), torch.randn(1, 2, 32, dtype=torch.float64)
    pairs = [
        (one.embed(tokens), two.embed(tokens)),
        (one.compute_logits(states), two.compute_logits(states)),
        (one.forward_uncached([1, 2, 3]), two.forward_uncached([1, 2, 3])),
        (one.forward_uncached([1, 2, 3], 2), two.forward_uncached([1, 2, 3], 2)),
        (probe_states(LoadedModel(target("llama"), None, "")), probe_states(llama)),
    ]
    for left, right in pairs:
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)


def test_several_threads_ask_at_once(llama: SplitModel) -> None:
    llm = LLM(llama, speculative_config={"method": "ngram"}, max_model_len=CONTEXT)
    expected, found = ids(llm.generate(PROMPTS, greedy(LENGTH))), {}

    def ask(number: int) -> None:
        found[number] = ids(llm.generate(PROMPTS[number], greedy(LENGTH)))
        llm.engine.target.forward_uncached(PROMPTS[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[number][0] for number in range(len(PROMPTS))] == expected


def test_ctrl_c_waits_for_the_pass_and_costs_no_text(llama: SplitModel) -> None:
    import signal

    llm = LLM(llama, speculative_config={"method": "ngram"}, max_model_len=CONTEXT)
    expected = ids(llm.generate(PROMPTS, greedy(LENGTH)))
    own: Any = llm.engine.target
    passes = iter(range(100))

    def forward(*given: Any, **named: Any) -> Any:
        if next(passes) == 3:
            signal.raise_signal(signal.SIGINT)
        return plain(*given, **named)

    plain = own._own.runner.model.forward
    own._own.runner.model.forward = forward
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, greedy(LENGTH))
        assert ids(llm.generate(PROMPTS, greedy(LENGTH))) == expected
    finally:
        own._own.runner.model.forward = plain


def test_a_model_that_is_let_go_of_leaves_the_other_process(
    both: Processes, tmp_path: Path
) -> None:
    import gc

    two = split(both, build("llama"), tmp_path)
    Leader(two, 1, CONTEXT)
    both._waiting.clear()
    number = two.number
    del two
    gc.collect()
    assert number in [call.arguments[0] for call in both._waiting if call.name == "forget"]
