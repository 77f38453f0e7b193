"""Synthetic pairs: the agreement that was asked for, text that wanders, models that load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.bench.model_shapes import (
    SMALLEST_VOCABULARY,
    LaterLayersScale,
    ModelShape,
    first_layers,
    random_model,
    shape_named,
    shapes,
)
from outpace.bench.synthetic import (
    Pair,
    PairOptions,
    Texts,
    byte_tokenizer,
    find_scale,
    generated,
    greedy_agreement,
    word,
)
from outpace.errors import ConfigError
from outpace.targets.hf.loading.load import load


def test_the_agreement_that_was_asked_for_is_reached_on_fresh_text(pair: Pair) -> None:
    # 96 positions: sampling alone deviates by 0.044. That twice, and the tolerance.
    assert abs(pair.measured.greedy - 0.75) < 0.15
    assert 0.5 < pair.measured.sampled < 1


def test_the_text_does_not_collapse(pair: Pair) -> None:
    assert pair.measured.distinct_4grams > 0.9
    assert pair.measured.distinct_tokens > 0.5
    assert 0.5 < pair.measured.entropy < 5


def test_what_was_written_is_what_was_measured(pair: Pair) -> None:
    target, drafter = load(pair.target).model, load(pair.drafter).model
    texts = Texts.random(4, 24, seed=pair.options.seed + 2, device=torch.device("cpu"))
    rate = greedy_agreement(drafter, generated(target, texts), texts.prompts.shape[1])
    assert rate == pair.measured.greedy
    written = json.loads((Path(pair.target).parent / "pair.json").read_text())
    assert written["measured"]["greedy"] == rate


def test_the_engine_takes_the_pair_and_speculates_at_that_rate(pair: Pair) -> None:
    llm = LLM(pair.target, speculative_config={"model": pair.drafter, "num_speculative_tokens": 3})
    params = SamplingParams(temperature=0, max_tokens=48)
    out = llm.generate(["Once upon a time", "def f(x):"], params)
    assert all(len(o.token_ids) == 48 for o in out), "no token ends a synthetic text"
    drafted = sum(o.metrics.drafted_per_position[0] for o in out)
    accepted = sum(o.metrics.accepted_per_position[0] for o in out)
    assert 0.5 < accepted / drafted < 0.95
    assert out[0].text != out[1].text


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_drafter_is_the_target_without_its_later_layers(family: str) -> None:
    shape = shape_named("tiny", family=family, draft_layers=2)
    target = random_model(shape, torch.float32, torch.device("cpu"), seed=1)
    drafter = first_layers(target, shape)
    LaterLayersScale(target, shape).scale = 0.0
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(target(ids).logits, drafter(ids).logits)


def test_the_same_seed_gives_the_same_weights_and_touches_no_generator() -> None:
    shape = shape_named("tiny")
    before = torch.get_rng_state()
    one, two = (random_model(shape, torch.float32, torch.device("cpu"), 5) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    weights = one.model.layers[3].mlp.up_proj.weight
    assert torch.equal(weights, two.model.layers[3].mlp.up_proj.weight)


def test_the_tokenizer_reads_any_bytes_and_says_every_id() -> None:
    tokenizer = byte_tokenizer(600)
    text = "Zoë: 42 €\n\tdef f(): pass"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert max(ids) < 256
    assert tokenizer.decode(ids) == text
    assert len({tokenizer.decode([i]) for i in range(257, 600)}) == 343
    assert max(tokenizer.get_vocab().values()) == 599


def test_words_are_distinct() -> None:
    assert len({word(number) for number in range(20_000)}) == 20_000


def test_bisection_stops_at_the_nearest_scale_it_has_seen() -> None:
    seen: list[float] = []

    def falling(scale: float) -> float:
        seen.append(scale)
        return 1 / (1 + 5 * scale)

    scale = find_scale(falling, asked=0.3, tolerance=0.0, rounds=6)
    assert len(seen) == 6
    assert scale == min(seen, key=lambda s: abs(1 / (1 + 5 * s) - 0.3))


def test_the_default_shape_is_about_200_and_28_million() -> None:
    shape = shapes()["bench-200m"]
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        sizes = [LlamaForCausalLM(shape.config(n)).num_parameters() / 1e6 for n in (16, 1)]
    assert sizes[0] == pytest.approx(205, abs=1)
    assert sizes[1] == pytest.approx(28.6, abs=0.1)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bench-200", {}, "did you mean 'bench-200m'"),
        ("custom", {"layers": 2}, "needs hidden, heads, intermediate, vocab"),
        ("tiny", {"draft_layers": 4}, "less than the 4 layers"),
        ("tiny", {"vocab": SMALLEST_VOCABULARY - 1}, "at least 258"),
        ("tiny", {"heads": 3}, "heads must divide"),
        ("tiny", {"family": "lama"}, "did you mean 'llama'"),
        ("tiny", {"hidden": 0}, "hidden must be at least 1"),
    ],
)
def test_shapes_that_cannot_be_are_refused(
    name: str, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_named(name, **changes)


def test_a_custom_shape() -> None:
    shape = shape_named("custom", layers=3, hidden=32, heads=2, intermediate=64, vocab=300)
    assert shape == ModelShape(layers=3, hidden=32, heads=2, kv_heads=2, intermediate=64, vocab=300)


@pytest.mark.parametrize(
    "options", [{"agreement": 1.0}, {"agreement": 0.0}, {"dtype": "float"}, {"tokens": 4}]
)
def test_bad_pair_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        PairOptions(**options)  # type: ignore[arg-type]
