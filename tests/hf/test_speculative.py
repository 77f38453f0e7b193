"""``model.generate`` with outpace.hf.speculative as custom_generate against plain ``generate``."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    MptConfig,
    MptForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from devices import on_device
from engine.texts import helper, ids_of, spelled, tokenizer, writer
from outpace.draft.registry import find_drafter
from outpace.errors import ConfigError, PromptError, UnsupportedModel
from outpace.heads.checkpoint import save_head
from outpace.hf import speculative
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.weights import pass_bytes
from representatives import representatives
from targets.families import VOCABULARY, build, drafter, noised, target

from .generating import (
    BATCHES,
    FAMILY,
    METHODS,
    NEW,
    ONE,
    PAD,
    RAGGED,
    ends_of,
    faster,
    generated,
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", BATCHES)
def test_greedy_equals_generate(batch: str, method: str) -> None:
    expected = generated(batch)
    for k in (1, 5):
        assert torch.equal(generated(batch, faster(method, k)), expected)


@pytest.mark.parametrize("method", METHODS)
def test_rows_end_at_their_own_eos_and_are_padded(method: str) -> None:
    end = ends_of(generated())
    expected = generated(eos_token_id=end)
    assert (expected[:, -1] == PAD).any(), "the rows should end at different places"
    assert torch.equal(generated(custom=faster(method), eos_token_id=end), expected)


GREEDY_OPTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[2], [34], [6, 7], [5, 5]]},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(0, 64, 3))},
    "min_length": {"min_length": 15, "eos_token_id": list(range(0, 64, 3))},
    "suppress_tokens": {"suppress_tokens": list(range(0, 64, 5))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(32))},
    "sequence_bias": {"sequence_bias": {(7,): 3.0, (5, 6): -9.0}},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (3, 1.5),
        "eos_token_id": 11,
    },
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 5.0},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(row, 64, 2 + len(ids) % 3))
    },
    "watermarking_config": {"watermarking_config": {"greenlist_ratio": 0.5, "bias": 8.0}},
    "renormalize_logits": {"renormalize_logits": True},
    "max_length": {"max_new_tokens": None, "max_length": 12},
}


@pytest.mark.parametrize(
    ("name", "batch"),
    representatives(
        itertools.product(GREEDY_OPTIONS, BATCHES),
        lambda name, batch: batch == "ragged" or name.startswith("encoder"),
    ),
)
def test_each_option_of_generate_acts_at_every_drafted_position(name: str, batch: str) -> None:
    options = GREEDY_OPTIONS[name]
    expected = generated(batch, **options)
    if batch == "ragged" and name != "renormalize_logits":
        assert not torch.equal(expected, generated(batch)), "the option should change something"
    assert torch.equal(generated(batch, faster(), **options), expected)


class EveryThird(LogitsProcessor):
    """A caller's own: which tokens are allowed depends on how long the text is."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = torch.arange(scores.shape[1]) % 3 == input_ids.shape[1] % 3
        return scores.masked_fill(~allowed, -math.inf)


def test_a_callers_own_processor_sees_each_positions_own_history() -> None:
    own = LogitsProcessorList([EveryThird()])
    expected = generated(logits_processor=own)
    assert torch.equal(generated(custom=faster(), logits_processor=own), expected)


class Length(StoppingCriteria):
    """Ends a row at a token that its own length decides, and remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids.shape[1])
        return (input_ids.sum(1) % 11 == 0) & (input_ids.shape[1] > 10)


def test_a_callers_own_criterion_is_asked_after_every_token_and_cuts_inside_a_run() -> None:
    expected = generated(stopping_criteria=StoppingCriteriaList([Length()]), eos_token_id=63)
    length, custom = Length(), faster("draft_model", 8)
    made = generated(
        custom=custom, stopping_criteria=StoppingCriteriaList([length]), eos_token_id=63
    )
    assert torch.equal(made, expected)
    for metrics, row in zip(custom.metrics, made, strict=True):
        assert metrics.num_emitted_tokens <= len(row) - RAGGED.shape[1]
    assert len(length.seen) == sum(metrics.num_emitted_tokens for metrics in custom.metrics)


def test_max_time_ends_the_text() -> None:
    timer = StoppingCriteriaList([MaxTimeCriteria(max_time=0.0)])
    assert generated("one", faster("ngram"), stopping_criteria=timer).shape[1] == ONE.shape[1] + 1


@pytest.mark.parametrize("stop", ["two", "e t", "four", "one"])
def test_a_stop_string_criterion_ends_the_text_where_generate_ends_it(stop: str) -> None:
    ids = on_device([ids_of("go:")])
    settings = {
        "max_new_tokens": 30,
        "do_sample": False,
        "pad_token_id": 0,
        "logits_processor": LogitsProcessorList([spelled("one two three four")]),
        "stopping_criteria": StoppingCriteriaList([StopStringCriteria(tokenizer(), stop)]),
    }
    expected = writer().generate(ids, **settings)
    custom = speculative(helper(), num_speculative_tokens=8)
    assert torch.equal(writer().generate(ids, custom_generate=custom, **settings), expected)
    assert tokenizer().decode(expected[0]).endswith(stop)


def test_a_dict_comes_back_where_it_is_asked_for() -> None:
    made = generated(custom=faster(), return_dict_in_generate=True)
    assert torch.equal(made.sequences, generated())


def test_num_return_sequences_gives_that_many_rows() -> None:
    torch.manual_seed(3)
    options = {"do_sample": True, "top_k": 0, "num_return_sequences": 3}
    made = generated("ragged", faster(), **options)
    assert made.shape[0] == 12
    assert len({tuple(row) for row in made[:3].tolist()}) == 3
    assert torch.equal(made[::3, : RAGGED.shape[1]], RAGGED)


@pytest.mark.parametrize("k", [4, "auto"])
def test_torch_manual_seed_repeats_a_sampled_text(k: Any) -> None:
    """Also where the engine has learned in between what pays."""
    custom = faster(k=k)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(generated(custom=custom, do_sample=True).tolist())
    assert texts[0] == texts[1] != texts[2]


def test_greedy_draws_nothing_from_torchs_generator() -> None:
    before = torch.get_rng_state()
    generated(custom=faster())
    assert torch.equal(torch.get_rng_state(), before)


def test_padding_may_stand_on_the_right() -> None:
    right = on_device([[5, 6, 7, PAD], [1, 2, 3, 4]])
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
    made = target(FAMILY).generate(
        right, attention_mask=(right != PAD).long(), custom_generate=faster(), **settings
    )
    for row, prompt in enumerate([[5, 6, 7], [1, 2, 3, 4]]):
        alone = target(FAMILY).generate(on_device([prompt]), **settings)
        assert torch.equal(made[row, 4:], alone[0, len(prompt) :])


SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "warpers": {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "warpers out of our order": {"temperature": 1.3, "top_k": 0, "epsilon_cutoff": 0.01},
    "penalty": {"top_k": 0, "repetition_penalty": 1.5, "no_repeat_ngram_size": 1},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_the_sampled_distribution_is_that_of_generate(name: str) -> None:
    """Chi-square over pairs of tokens; a right implementation fails one seed in 10 000."""
    options = {"do_sample": True, "max_new_tokens": 2, "pad_token_id": PAD, **SAMPLING[name]}
    small = build(FAMILY, vocab_size=8, num_hidden_layers=1)
    small = scaled(small, 0.5)
    distribution = pair_probs(small, on_device([[1, 2]]), options)
    custom = speculative(noised(small, 0.3), num_speculative_tokens=2)
    torch.manual_seed(5)
    ids = on_device([[1, 2]])
    options["num_return_sequences"] = 500
    calls = [small.generate(ids, custom_generate=custom, **options) for _ in range(3)]
    found = Counter(tuple(row[2:].tolist()) for made in calls for row in made)
    count = found.total()
    assert set(found) <= set(distribution), "an impossible text"
    common = {pair for pair, mass in distribution.items() if mass * count >= 5}
    observed = [found[pair] for pair in common]
    expected = [distribution[pair] * count for pair in common]
    rest = sum(found.values()) - sum(observed)
    if count - sum(expected) > 1:
        observed, expected = [*observed, rest], [*expected, count - sum(expected)]
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > 1e-4


def scaled(model: Any, factor: float) -> Any:
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
    return model


def pair_probs(model: Any, ids: Tensor, options: dict[str, Any]) -> dict[tuple[int, int], float]:
    """The distribution of the next two tokens, from the scores that ``generate`` itself reports."""

    def next_probs(prompt: Tensor, skip: int) -> Tensor:
        forced = prompt[0, ids.shape[1] :].tolist()

        def only(row: int, history: Tensor) -> list[int]:
            done = len(history) - ids.shape[1]
            return [forced[done]] if done < len(forced) else list(range(model.config.vocab_size))

        made = model.generate(
            ids,
            prefix_allowed_tokens_fn=only,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        return made.scores[skip][0].double().softmax(-1)

    first = next_probs(ids, 0)
    distribution = {}
    for token in first.nonzero()[:, 0].tolist():
        then = next_probs(torch.cat([ids, on_device([[token]])], 1), 1)
        for after in then.nonzero()[:, 0].tolist():
            distribution[token, after] = float(first[token] * then[after])
    return distribution


@pytest.mark.parametrize("options", [{"top_p": 0.0}, {"temperature": 1e-9}])
def test_values_that_only_generate_takes_act_as_there(options: dict[str, Any]) -> None:
    asked = {"do_sample": True, "top_k": 0, **options}
    assert torch.equal(generated("one", faster(), **asked), generated("one"))
    assert torch.equal(generated("one", **asked), generated("one"))


# -- what is refused -------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "beam": {"num_beams": 2},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "output_scores": {"return_dict_in_generate": True, "output_scores": True},
    "output_logits": {"return_dict_in_generate": True, "output_logits": True},
    "output_attentions": {"return_dict_in_generate": True, "output_attentions": True},
    "output_hidden_states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "UnbatchedClassifierFreeGuidance": {"guidance_scale": 1.5},
    "positions for 128": {"max_new_tokens": 500},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        generated("one", faster(), **REFUSED[name])


def test_generates_own_assistant_is_refused() -> None:
    with pytest.raises(ConfigError, match="assist"):
        generated("one", faster(), assistant_model=drafter(FAMILY))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_ids": torch.arange(5)[None] + 3}, "position_ids"),
        ({"inputs_embeds": torch.zeros(1, 5, 32).double()}, "inputs_embeds"),
    ],
)
def test_model_arguments_that_would_be_ignored_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        generated("one", faster(), **arguments)


# transformers 5.24 calls a model's cache "cache", and takes the earlier names with a warning.
earlier_names = pytest.mark.filterwarnings(
    "ignore:.* is deprecated and will be removed:FutureWarning"
)


@earlier_names
def test_a_cache_that_is_handed_over_stays_empty() -> None:
    cache = DynamicCache()
    assert torch.equal(generated(custom=faster(), past_key_values=cache), generated())
    assert cache.get_seq_length() == 0
    generated("one", past_key_values=cache)
    with pytest.raises(ConfigError, match=r"past_key_values|cache"):
        generated("one", faster(), past_key_values=cache)


@earlier_names
@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba"])
def test_a_model_that_calls_its_cache_otherwise(family: str) -> None:
    model, settings = target(family), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    expected = model.generate(ONE, return_dict_in_generate=True, **settings)
    assert torch.equal(
        model.generate(ONE, custom_generate=faster("ngram"), **settings), expected[0]
    )
    filled = DynamicCache(config=model.config)
    model(ONE, cache_params=filled, use_cache=True)
    with pytest.raises(ConfigError, match="go on from cache"):
        model.generate(ONE, custom_generate=faster("ngram"), cache_params=filled, **settings)


def test_an_unknown_option_or_method_is_refused_when_first_used() -> None:
    with pytest.raises(ConfigError, match=r"ngramm.*did you mean 'ngram'"):
        generated("one", speculative(method="ngramm"))
    with pytest.raises(ConfigError, match="prompt_lookup_mox"):
        generated("one", speculative(method="ngram", prompt_lookup_mox=3))
    with pytest.raises(ConfigError, match="twice"):
        speculative("a", model="b")


def test_a_row_of_padding_only_is_refused() -> None:
    ids = on_device([[PAD, PAD], [1, 2]])
    with pytest.raises(PromptError, match="row 0"):
        target(FAMILY).generate(
            ids, attention_mask=(ids != PAD).long(), custom_generate=faster(), max_new_tokens=2
        )


def test_a_model_that_cannot_be_decoded_speculatively_is_refused() -> None:
    mpt = MptForCausalLM(MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=1, n_heads=4))
    with pytest.raises(UnsupportedModel, match="ALiBi"):
        mpt.generate(ONE, custom_generate=speculative(method="ngram"), max_new_tokens=2)


@pytest.mark.parametrize("rule", ["token", "match", "coupled"])
def test_every_rule_can_be_named(rule: str) -> None:
    assert torch.equal(generated(custom=faster(verify=rule)), generated())


@pytest.mark.parametrize(("ours", "theirs"), [(64, 72), (72, 64)])
def test_vocabularies_of_other_sizes_need_both_tokenizers(ours: int, theirs: int) -> None:
    model, small = build(FAMILY, vocab_size=ours), build(FAMILY, vocab_size=theirs)
    with pytest.raises(ConfigError, match="both"):
        model.generate(ONE, custom_generate=speculative(small), max_new_tokens=4)

    class Words:
        def __call__(self, text: str) -> None:
            raise AssertionError("only its vocabulary is wanted")

        def get_vocab(self) -> dict[str, int]:
            return {str(token): token for token in range(60)}

    custom = speculative(small, tokenizer=Words(), drafter_tokenizer=Words())
    settings = {"max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(ONE, **settings)
    assert torch.equal(model.generate(ONE, custom_generate=custom, **settings), expected)


@pytest.mark.parametrize(
    ("options", "size"),
    [({"dtype": "float64"}, 8), ({"dtype": "float32", "quantization": "int8"}, 1)],
)
def test_the_drafters_own_options_reach_it(
    options: dict[str, Any], size: int, tmp_path: Path
) -> None:
    """size: bytes of a weight; in 8 bits a scale for each output, or each 32 weights, comes to
    it."""
    drafter(FAMILY).save_pretrained(tmp_path)
    custom = speculative(tmp_path, num_speculative_tokens=3, **options)
    assert torch.equal(generated("one", custom), generated("one"))
    head = custom._llm.engine.drafter.runner.model.lm_head  # type: ignore[union-attr]
    weights = head.in_features * head.out_features
    assert size * weights <= pass_bytes(head) <= 1.3 * size * weights


@pytest.mark.parametrize("method", ["eagle3", "medusa", "hidden_transfer"])
def test_a_trained_head_drafts(method: str, tmp_path: Path) -> None:
    """It is no model of transformers, by path or loaded."""
    head = find_drafter(method).dummy_options(LoadedModel(target(FAMILY), None, FAMILY))["model"]
    save_head(head, tmp_path)
    for model in (head, tmp_path):
        custom = speculative(model, method=method, num_speculative_tokens=3, check=False)
        assert torch.equal(generated("ragged", custom), generated("ragged"))
        assert sum(each.num_draft_tokens for each in custom.metrics) > 0


def test_a_head_is_not_loaded_in_another_dtype() -> None:
    with pytest.raises(ConfigError, match="unknown key 'dtype'"):
        speculative("a/head", method="medusa", dtype="float32")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "nope"}, "unknown method 'nope'"),
        ({"method": "beam"}, r"unknown method 'beam': .* LLM\.beam_search"),
        ({"drafter": "a/model", "prompt_lookup_max": 3}, "unknown key 'prompt_lookup_max'"),
        ({"num_speculative_tokens": "many"}, "must be 'auto' or a whole number"),
        ({"verify": "nope"}, "unknown verify rule 'nope'"),
    ],
)
def test_options_are_refused_before_anything_is_generated(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        speculative(**options)
