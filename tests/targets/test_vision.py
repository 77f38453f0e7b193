"""Texts of vision-language models equal those of transformers' ``generate``, token for token."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from outpace import LLM, SamplingParams
from outpace.draft.registry import drafter_names, find_drafter
from outpace.engine.capture import EagerRunner
from outpace.errors import ConfigError, UnsupportedModel
from outpace.hf import speculative
from outpace.targets.hf import runner
from outpace.targets.hf import target as target_module
from outpace.targets.hf.fixed import FixedShapeConfig
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.lock import model_lock
from outpace.targets.hf.vision import images as vision_images
from outpace.targets.hf.vision.images import IDENTICAL, try_images
from representatives import representatives

from .families import BASE, noised
from .generating import greedy, ids
from .vision_families import (
    CONTEXT,
    FAMILIES,
    IMAGE,
    PLACEHOLDER,
    PROMPTS,
    build,
    plain,
    target,
    with_image,
)

LENGTH = 14
SOME = ("llava", "qwen3_vl", "gemma3", "paligemma")
"""Plain positions, rotary ones of three axes and features in several layers, spans that are read
both ways, prompts that are."""
EACH = representatives(FAMILIES, SOME)
SOME_DRAFTERS = ("draft_tree", "eagle3", "medusa", "pass", "early_exit", "lookahead", "staged")
"""A tree, heads that read states or columns of their own, a part of the target, windows that ride
in its pass, and a drafter of several."""


@cache
def text_model(vocabulary: int = 64) -> Any:
    """Returns a small language model that never sees an image."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**{**BASE, "vocab_size": vocabulary})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


@cache
def blind(family: str) -> Any:
    """Returns a copy of the target whose guesses are right now and then: used as a drafter it is
    given no image."""
    return noised(target(family), 0.02)


def decoder(family: str, method: str = "none", rows: int = 4, **more: Any) -> LLM:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 4, **more}
    if method in ("draft_model", "draft_tree"):
        config.setdefault("model", blind(family))
    return LLM(target(family), speculative_config=config, max_num_seqs=rows, max_model_len=CONTEXT)


def prompts(family: str) -> list[Any]:
    return [with_image(family, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("family", "method"),
    representatives(
        itertools.product(FAMILIES, ["none", "ngram", "draft_model"]),
        lambda family, method: method == "draft_model" or family == SOME[0],
    ),
)
def test_ragged_batches_and_single_rows_equal_generate(family: str, method: str) -> None:
    llm = decoder(family, method)
    outputs = llm.generate(prompts(family), greedy(LENGTH))
    assert ids(outputs) == plain(family, LENGTH)
    alone = llm.generate(prompts(family)[2], greedy(LENGTH))
    assert ids(alone) == [plain(family, LENGTH)[2]]


@pytest.mark.parametrize("family", FAMILIES)
def test_images_change_the_text(family: str) -> None:
    """Without this the other tests would say little."""
    inputs = with_image(family, PROMPTS[0])
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}
    with torch.no_grad():
        seen, otherwise = (target(family)(**given).logits[0, -1] for given in (inputs, other))
    assert not torch.allclose(seen, otherwise, atol=1e-3)


def test_every_family_that_is_not_tried_out_is_compared_here() -> None:
    assert {target(family).config.model_type for family in FAMILIES} == IDENTICAL


@pytest.mark.parametrize("family", EACH)
def test_trees_equal_generate(family: str) -> None:
    llm = decoder(family, "draft_tree", branching=[2, 2, 1], num_speculative_tokens="auto")
    assert ids(llm.generate(prompts(family), greedy(LENGTH))) == plain(family, LENGTH)


@pytest.mark.parametrize(
    ("family", "chunk"),
    representatives(
        itertools.product(FAMILIES, [1, 5]),
        lambda family, chunk: family in SOME and (chunk == 5 or family == "gemma3"),
    ),
)
def test_prompts_are_read_in_pieces(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PREFILL_CHUNK", chunk)
    monkeypatch.setattr(target_module, "PREFILL_CHUNK", chunk)
    llm = decoder(family, "ngram")
    assert ids(llm.generate(prompts(family), greedy(LENGTH))) == plain(family, LENGTH)
    assert llm.engine.target.lengths == []


@pytest.mark.parametrize("family", SOME)
def test_several_samples_of_one_prompt_read_it_once(family: str) -> None:
    llm = decoder(family, "draft_model")
    (output,) = llm.generate(prompts(family)[0], greedy(LENGTH, n=3))
    assert [one.token_ids for one in output.outputs] == [plain(family, LENGTH)[0]] * 3


@pytest.mark.parametrize("family", SOME)
def test_a_drafter_may_lack_tokens_of_the_target(family: str) -> None:
    """Not only those that stand for images: the target's text may hold any of its tokens."""
    small = LoadedModel(text_model(20), None, "a small text model", same_tokens=True)
    for method in ("draft_model", "draft_tree"):
        llm = decoder(family, method, model=small)
        assert ids(llm.generate(prompts(family), greedy(LENGTH))) == plain(family, LENGTH)


def test_a_drafter_is_given_the_text_without_placeholders() -> None:
    llm = decoder("llava", "draft_model", model=text_model())
    fed: list[int] = []
    drafter: Any = llm.engine.drafter
    forward = drafter.runner.forward

    def note(tokens: Any, *args: Any, **options: Any) -> Any:
        fed.extend(tokens.flatten().tolist())
        return forward(tokens, *args, **options)

    drafter.runner.forward = note
    llm.generate(prompts("llava")[0], greedy(4))
    assert PLACEHOLDER not in fed[:6]
    assert fed[:6] == [5, 6, 61, 62, 7, 8]


@pytest.mark.parametrize("family", SOME)
def test_an_interruption_costs_no_text(family: str) -> None:
    llm = decoder(family, "ngram")
    commit, calls = llm.engine.target.commit, 0

    def interrupted(paths: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        commit(paths)

    llm.engine.target.commit = interrupted  # type: ignore[method-assign]
    groups = [llm.requests(prompt, greedy(LENGTH)) for prompt in prompts(family)]
    requests = [request for group in groups for request in group]
    for request in requests:
        llm.engine.add(request)
    for _ in range(3):
        with suppress(KeyboardInterrupt):
            llm.engine.step()
    assert calls >= 3, "it should have been interrupted"
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert [request.output_ids for request in requests] == plain(family, LENGTH)


def test_texts_with_images_are_not_taken_for_one_another() -> None:
    """Two prompts with the same tokens, which show other images."""
    llm = LLM(target("llava"), max_num_seqs=2, enable_prefix_caching=True, max_model_len=CONTEXT)
    inputs = with_image("llava", PROMPTS[2])
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}
    first = ids(llm.generate(inputs, greedy(LENGTH)))
    second = ids(llm.generate(other, greedy(LENGTH)))
    assert first == [plain("llava", LENGTH)[2]]
    assert second == ids(decoder("llava").generate(other, greedy(LENGTH)))
    assert first != second


@pytest.mark.parametrize("method", representatives(drafter_names(), SOME_DRAFTERS))
def test_every_drafter_equals_generate(method: str) -> None:
    """The others see no images either; heads read what the target made of them."""
    loaded = LoadedModel(target("qwen3_vl"), None, "a tiny model")
    config = {"method": method, **find_drafter(method).dummy_options(loaded)}
    if method != "none":
        config.setdefault("num_speculative_tokens", 3)
    llm = LLM(loaded, speculative_config=config, max_num_seqs=4, max_model_len=CONTEXT)
    assert ids(llm.generate(prompts("qwen3_vl"), greedy(8))) == [
        text[:8] for text in plain("qwen3_vl", LENGTH)
    ]


@pytest.mark.parametrize("family", SOME)
def test_sampled_texts_are_those_of_plain_decoding(family: str) -> None:
    """With the coupled rule a seed gives the same text, whatever is drafted."""
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=LENGTH, ignore_eos=True)
    texts = [
        ids(decoder(family, method, verify="coupled").generate(prompts(family), params))
        for method in ("none", "draft_model")
    ]
    assert texts[0] == texts[1]
    assert texts[0] != plain(family, LENGTH)


@pytest.mark.parametrize("family", ["qwen2_vl", "paligemma"])
def test_passes_of_fixed_shapes_stand_where_the_others_do(family: str) -> None:
    llm = decoder(family, "ngram")
    own: Any = llm.engine.target
    own.runner.use_fixed_shapes(FixedShapeConfig(own.model, EagerRunner(), pads=True))
    assert ids(llm.generate(prompts(family), greedy(LENGTH))) == plain(family, LENGTH)


@pytest.mark.parametrize("family", SOME)
def test_inside_generate(family: str) -> None:
    faster = speculative(method="ngram", num_speculative_tokens=3)
    for prompt, text in zip(PROMPTS, plain(family, LENGTH), strict=True):
        inputs = with_image(family, prompt)
        made = target(family).generate(
            **inputs,
            custom_generate=faster,
            max_new_tokens=LENGTH,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert made[0, inputs["input_ids"].shape[1] :].tolist() == text


def test_generate_with_the_images_of_several_prompts_is_refused() -> None:
    inputs = with_image("llava", PROMPTS[0])
    batch = {name: torch.cat([value, value]) for name, value in inputs.items()}
    with pytest.raises(ConfigError, match="one prompt at a time"):
        target("llava").generate(**batch, custom_generate=speculative(), max_new_tokens=3)


def test_a_family_that_nobody_knows_is_tried_with_its_first_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vision_images, "IDENTICAL", frozenset())
    for family in SOME:
        llm = decoder(family)
        assert ids(llm.generate(prompts(family), greedy(4))) == [
            text[:4] for text in plain(family, LENGTH)
        ]
    assert IMAGE not in PROMPTS[1]
    assert build("llava") is not target("llava")


def test_windows_in_prompts_that_are_read_both_ways_are_refused() -> None:
    """PaliGemma 2: its forward takes one mask for all layers."""
    model = build("paligemma")
    model.config.text_config.sliding_window = 6
    with pytest.raises(UnsupportedModel, match="no mask for each type of layer"):
        LLM(model)


def test_nobody_else_computes_while_a_model_is_tried_with_images() -> None:
    """Modules that another thread has hooked or exchanged for a pass would spoil the trial."""
    model, given = build("llava"), with_image("llava", PROMPTS[0])
    turn: Any = model_lock(model)
    taken: list[bool] = []
    with ThreadPoolExecutor(1) as others:

        def ask(*_: object) -> None:
            taken.append(others.submit(turn.acquire, blocking=False).result())
            if taken[-1]:
                others.submit(turn.release).result()

        model.register_forward_pre_hook(ask)
        try_images(model, given.pop("input_ids")[0].tolist(), given)
    assert taken
    assert not any(taken)
