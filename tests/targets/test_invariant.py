"""Passes of one shape: a token's logits have the same bits whatever else is in the pass."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from devices import cpu_only
from outpace import LLM, SamplingParams
from outpace.engine.verify_on_load import verify_invariance
from outpace.errors import ConfigError, ParamsError
from outpace.targets.base import ScoreInputs, Scores
from outpace.targets.cpu.threads import ThreadLimit
from outpace.targets.hf import target as target_module
from outpace.targets.hf.invariance import INVARIANT_COLUMNS, max_invariant_tokens
from outpace.targets.hf.target import HFTarget
from seq2seq.models import target as source_model

from .families import CONTEXT, VOCABULARY, build, drafter, target
from .generating import greedy, ids
from .vision_families import target as image_model

PROMPTS = [[5, 9, 2, 41], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [3, 1]]
SPECULATION: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
    "suffix": {"method": "suffix"},
    "draft_tree": {"method": "draft_tree"},
    "layer_skip": {
        "method": "layer_skip",
        "layers": {"attention": [0]},
        "num_speculative_tokens": 2,
    },
}


class ByShape(nn.Linear):
    """A layer whose last bits depend on how many tokens there are, as rounding's do everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[:-1].numel()
        return super().forward(x) * (1 + 1e-9 * (tokens % 7))


@pytest.fixture
def by_shape() -> Any:
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = ByShape
    return model


def decoder(
    model: Any, method: str = "none", rows: int = 4, compile: Any = "auto", **options: Any
) -> LLM:
    config = {**SPECULATION[method], **options}
    if method.startswith("draft"):
        config["model"] = drafter("llama")
    return LLM(
        model,
        speculative_config=config,
        max_num_seqs=rows,
        max_model_len=CONTEXT,
        batch_invariant=True,
        compile=compile,
    )


def test_a_trial_finds_out_that_passes_depend_on_their_shape(by_shape: Any) -> None:
    ordinary = HFTarget(by_shape, 4, CONTEXT)
    with pytest.raises(ConfigError, match=r"llama on \S+ in float64 gives .* batch_invariant out"):
        verify_invariance(ordinary, "llama", VOCABULARY)
    assert ordinary.num_rows == 0
    verify_invariance(decoder(by_shape).engine.target, "llama", VOCABULARY)


@pytest.mark.parametrize("method", sorted(SPECULATION))
def test_texts_are_the_same_with_speculation_and_in_company(by_shape: Any, method: str) -> None:
    wanted = greedy(12, logprobs=2)
    alone = [decoder(by_shape).generate(prompt, wanted)[0] for prompt in PROMPTS]
    found = decoder(by_shape, method).generate(PROMPTS, wanted)
    for one, other in zip(found, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs, "to the last bit"


def test_a_text_with_a_seed_is_the_same_under_coupled(by_shape: Any) -> None:
    params = [SamplingParams(temperature=0.9, seed=n, max_tokens=12) for n in range(4)]
    plain = decoder(by_shape, verify="coupled")
    alone = [plain.generate(p, q)[0] for p, q in zip(PROMPTS, params, strict=True)]
    assert ids(decoder(by_shape, "draft_model", verify="coupled").generate(PROMPTS, params)) == ids(
        alone
    )


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen2-window"])
def test_what_is_written_is_the_models(
    family: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows write while others have read a part of their prompts, which padding must spare."""
    monkeypatch.setattr(target_module, "PREFILL_CHUNK", 3)
    limits: dict[str, Any] = {"max_num_seqs": rows, "max_model_len": CONTEXT}
    config = {"method": "ngram", "num_speculative_tokens": 3}
    plain = LLM(target(family), speculative_config={"method": "none"}, **limits)
    found = LLM(
        target(family),
        speculative_config=config,
        batch_invariant=True,
        max_num_batched_tokens=1,
        **limits,
    )
    asked = [greedy(4 + 3 * row) for row in range(len(PROMPTS))]
    for _ in range(2):
        assert ids(found.generate(PROMPTS, asked)) == ids(plain.generate(PROMPTS, asked))


def test_passes_over_texts_have_one_shape(by_shape: Any) -> None:
    llm, seen = decoder(by_shape, "draft_model", compile=False), set()
    own = by_shape.model.layers[0].mlp.down_proj
    hook = own.register_forward_hook(lambda _m, given, _o: seen.add(tuple(given[0].shape[:2])))
    # A prompt of one token leaves nothing to be read before its first round.
    llm.generate([[7], [8], [9]], greedy(10))
    hook.remove()
    assert seen == {(4, INVARIANT_COLUMNS)}


def test_our_own_passes_need_no_padding() -> None:
    llm = on_a_cpu(speculative_config={"method": "suffix"}, max_num_seqs=4)
    found = llm.engine.target
    assert found.invariance is not None
    assert found.runner.fixed is None
    assert found.max_nodes == max_invariant_tokens(llm.target.model) // 4 - 1
    texts = ["Once upon a time", "The captain", "A dog and a cat", "Lily"]
    together = llm.generate(texts, greedy(40))
    alone = [llm.generate(text, greedy(40, speculative="off"))[0] for text in texts]
    assert ids(together) == ids(alone)


def test_bfloat16_writes_one_text() -> None:
    """With sixteen bits near-ties are frequent: each second text of this length differs without."""
    params, texts = greedy(48), ["Once upon a time", "The captain of the ship"]
    found = []
    for method in ("none", "draft_model"):
        llm = LLM(
            speculative_config={"method": method},
            dtype="bfloat16",
            device="cpu",
            max_num_seqs=2,
            batch_invariant=True,
        )
        found.append(ids(llm.generate(texts, params)))
        found.append([llm.generate(text, params)[0].token_ids for text in texts])
    assert found == [found[0]] * 4


# -- what is refused ---------------------------------------------------------------------------


def refused(model: Any, sentence: str, config: Any = None, **more: Any) -> None:
    more = {"max_num_seqs": 4, "max_model_len": CONTEXT, **more}
    with pytest.raises(ConfigError, match=sentence):
        LLM(model, speculative_config=config or {"method": "none"}, batch_invariant=True, **more)


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("mamba2", "goes on from a state"),
        ("mixtral", "mixture of experts"),
    ],
)
def test_models_whose_passes_cannot_be_alike_are_refused(family: str, sentence: str) -> None:
    refused(target(family), rf"{sentence}.*leave batch_invariant out")


@pytest.mark.parametrize("model", ["images", "sources"])
def test_models_that_read_more_than_tokens_are_refused(model: str) -> None:
    found = image_model("llava") if model == "images" else source_model("t5")
    refused(found, "reads more than tokens.*leave batch_invariant out")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"method": "lookahead"}, "'lookahead' has columns of its own"),
        ({"method": "consensus"}, "'consensus' drafts trees"),
        ({"method": "recycling", "branching": [2, 1]}, "'recycling' drafts trees"),
        (
            {"method": "hedge", "drafters": [{"method": "ngram"}, {"method": "lookahead"}]},
            "'lookahead' has columns of its own",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": INVARIANT_COLUMNS},
            f"scores {INVARIANT_COLUMNS - 1} drafted tokens of a text at most here, "
            f"not {INVARIANT_COLUMNS}",
        ),
    ],
)
def test_other_columns_than_a_chains_are_refused(config: Any, sentence: str) -> None:
    refused(target("llama"), sentence, config)


@pytest.mark.parametrize(
    ("option", "value"), [("enable_prefix_caching", True), ("max_batch_total_tokens", CONTEXT)]
)
def test_reading_a_text_again_is_refused(option: str, value: Any) -> None:
    refused(target("llama"), rf"leave {option} or batch_invariant out", **{option: value})


def test_a_request_for_more_drafted_tokens_is_refused_alone() -> None:
    llm = decoder(target("llama"), "suffix")
    with pytest.raises(ParamsError, match=f"speculative must be at most {INVARIANT_COLUMNS - 1}"):
        llm.generate([1, 2], greedy(4, speculative=INVARIANT_COLUMNS))
    assert len(llm.generate([1, 2], greedy(4, speculative=INVARIANT_COLUMNS - 1))[0].token_ids) == 4


def on_a_cpu(**more: Any) -> LLM:
    """The bundled model in our own passes; skips where this machine has none."""
    llm = LLM(dtype="float32", device="cpu", batch_invariant=True, **more)
    if not max_invariant_tokens(llm.target.model):
        pytest.skip("this machine cannot run the passes of native.cpp")
    return llm


@pytest.mark.parametrize(
    "config",
    [
        {"method": "lookahead"},
        {"method": "lookahead", "verify": "coupled", "num_speculative_tokens": 6},
        {"method": "draft_model", "verify": "reflective"},
    ],
    ids=str,
)
def test_columns_that_ride_count_among_those_that_are_alike(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 1 if "reflective" in config.values() else 4
    llm = on_a_cpu(max_num_seqs=rows, speculative_config=config)
    widths, score = [], HFTarget.score

    def noting(self: HFTarget, plan: ScoreInputs) -> Scores:
        aux_tokens = plan.aux_tokens.size if plan.aux_tokens else 0
        columns = max(map(len, plan.pending)) + plan.tree.size + aux_tokens
        widths.append(len(plan.pending) * columns)
        return score(self, plan)

    monkeypatch.setattr(HFTarget, "score", noting)
    llm.generate(["One day,", "A dog", "The sun", "Lily"], greedy(24))
    assert max(widths) <= max_invariant_tokens(llm.target.model)
    assert max(widths) > 8, "something rode"


def test_more_texts_than_our_own_passes_have_room_for_are_refused() -> None:
    on_a_cpu(max_num_seqs=32)
    with pytest.raises(ConfigError, match=r"takes \d+ with one drafted.*max_num_seqs to 6 or less"):
        on_a_cpu(max_num_seqs=7, speculative_config={"method": "lookahead"})
    for config, room in (({"method": "suffix"}, 32), ({"method": "none"}, 64)):
        with pytest.raises(ConfigError, match=rf"lower max_num_seqs to {room} or less"):
            on_a_cpu(max_num_seqs=room + 1, speculative_config=config)


def test_a_hook_on_our_own_layers_is_refused() -> None:
    llm = on_a_cpu(max_num_seqs=2)
    hook = llm.target.model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="exchanged or hooked since"):
        llm.generate("Once", greedy(4))
    hook.remove()
    assert len(llm.generate("Once", greedy(4))[0].token_ids) == 4


@cpu_only("On a GPU nothing depends on the number of threads.")
def test_the_number_of_threads_stays_what_it_is(by_shape: Any) -> None:
    """A target gives way to other programs by computing with fewer threads, which add up in
    another order."""
    assert isinstance(HFTarget(by_shape, 1, CONTEXT).step_context(), ThreadLimit)
    assert not isinstance(decoder(by_shape).engine.target.step_context(), ThreadLimit)


def test_it_is_a_flag() -> None:
    refused_value: Any = "yes"
    with pytest.raises(ConfigError, match="batch_invariant must be True or False"):
        LLM(target("llama"), batch_invariant=refused_value)
