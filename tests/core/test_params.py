"""What may be asked for: every bad value is refused by name, and unset options are the model's."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from outpace.core.options import Option, options_of
from outpace.core.params import SamplingParams
from outpace.core.values import shown
from outpace.errors import OutpaceError, ParamsError

BAD: list[tuple[str, Any, str]] = [
    ("n", 0, r"at least 1, not 0"),
    ("n", None, r"whole number"),
    ("n", 1.5, r"whole number"),
    ("temperature", -0.1, r"\[0, inf\), not -0\.1"),
    ("temperature", math.inf, r"\[0, inf\)"),
    ("temperature", math.nan, r"a number"),
    ("temperature", "0.7", r"a number in \[0, inf\), not '0\.7'"),
    ("temperature", True, r"a number"),
    ("temperature", 1e-7, r"0 \(greedy\) or at least 1e-06"),
    ("top_k", -2, r"at least -1, not -2"),
    ("top_k", 2.0, r"whole number, not 2\.0"),
    ("top_p", 0, r"\(0, 1\], not 0"),
    ("top_p", 1.01, r"\(0, 1\], not 1\.01"),
    ("top_p", math.nan, r"a number"),
    ("min_p", -0.01, r"\[0, 1\]"),
    ("min_p", 1.01, r"\[0, 1\]"),
    ("typical_p", 0.0, r"\(0, 1\]"),
    ("typical_p", 1.5, r"\(0, 1\]"),
    ("repetition_penalty", 0, r"\(0, inf\)"),
    ("repetition_penalty", math.inf, r"\(0, inf\)"),
    ("presence_penalty", -2.1, r"\[-2, 2\]"),
    ("presence_penalty", 2.1, r"\[-2, 2\]"),
    ("frequency_penalty", -2.1, r"\[-2, 2\]"),
    ("frequency_penalty", 2.1, r"\[-2, 2\]"),
    ("logit_bias", {-1: 1.0}, r"token ids \(0 or positive\), not -1"),
    ("logit_bias", {"a": 1.0}, r"token ids"),
    ("logit_bias", {3: math.nan}, r"token 3 must be a number or -inf"),
    ("logit_bias", {3: math.inf}, r"token 3 must be a number or -inf"),
    ("allowed_token_ids", [], r"empty"),
    ("allowed_token_ids", [1, -2], r"token ids \(0 or positive\), not -2"),
    ("bad_words", "word", r"list of non-empty strings"),
    ("bad_words", ["word", ""], r"list of non-empty strings"),
    ("bad_words", [7], r"list of non-empty strings"),
    ("bad_words_ids", [[1], []], r"empty list"),
    ("bad_words_ids", [1, 2], r"list of lists"),
    ("bad_words_ids", [[1, -1]], r"token ids"),
    ("logits_processors", ["softmax"], r"functions of \(ids, scores\)"),
    ("seed", 1.0, r"whole number"),
    ("seed", 2**63, r"at most 9223372036854775807, not"),
    ("seed", -(2**63) - 1, r"at least -9223372036854775808, not"),
    ("max_tokens", 0, r"at least 1"),
    ("max_tokens", 1.0, r"whole number"),
    ("min_tokens", -1, r"at least 0, not -1"),
    ("min_tokens", 1.5, r"whole number"),
    ("stop", "", r"none of them empty"),
    ("stop", ["a", ""], r"none of them empty"),
    ("stop", [3], r"list of strings"),
    ("stop_token_ids", [-1], r"token ids"),
    ("stop_token_ids", ["</s>"], r"token ids"),
    ("logprobs", -1, r"at least 0, not -1"),
    ("logprobs", True, r"whole number"),
    ("speculative", "on", r"'auto', 'off' or a whole number from 0 to 256, not 'on'"),
    ("speculative", -1, r"'auto', 'off' or a whole number from 0 to 256, not -1"),
    ("speculative", 257, r"a whole number from 0 to 256, not 257"),
    ("speculative", True, r"'auto', 'off' or a whole number from 0 to 256"),
    ("n", 10**9, r"at most 16384"),
    ("temperature", 10**400, r"\[0, inf\), not 1000"),
    ("temperature", -(10**400), r"\[0, inf\), not -1000"),
    ("seed", 10**5000, r"at most 9223372036854775807, not a value of type int"),
    ("presence_penalty", None, r"a number in \[-2, 2\], not None"),
    ("logit_bias", [(3, 1.0)], r"a dict of token id and number"),
    ("logit_bias", {3: 10**400}, r"token 3 must be a number or -inf"),
    ("logit_bias", {3: True}, r"token 3 must be a number or -inf"),
    ("allowed_token_ids", 5, r"a list of token ids, not 5"),
    ("allowed_token_ids", b"ab", r"a list of token ids, not b'ab'"),
    ("bad_words", ["a\ud800"], r"not Unicode text"),
    ("bad_words_ids", 3, r"a list of lists of token ids"),
    ("logits_processors", print, r"a list of functions"),
    ("stop", 3, r"string or a list of strings"),
    ("stop", {"a": 1}, r"string or a list of strings"),
    ("stop", "a\ud800", r"string or a list of strings"),
    ("stop_token_ids", 3, r"a list of token ids, not 3"),
    ("stop_token_ids", "13", r"a list of token ids, not '13'"),
    ("stop_token_ids", [True], r"token ids"),
    ("speculative", np.array([1, 2]), r"'auto', 'off' or a whole number from 0 to 256"),
    ("ignore_eos", "false", r"True or False, not 'false'"),
    ("skip_special_tokens", None, r"True or False, not None"),
    ("include_stop_str_in_output", 1, r"True or False, not 1"),
]


@pytest.mark.parametrize(("name", "value", "remedy"), BAD, ids=lambda v: shown(v)[:24])
def test_a_bad_value_is_refused_with_its_name_and_what_to_do(
    name: str, value: Any, remedy: str
) -> None:
    with pytest.raises(ParamsError, match=remedy) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)


def test_a_bad_option_is_a_value_error_and_an_outpace_error() -> None:
    assert issubclass(ParamsError, ValueError)
    assert issubclass(ParamsError, OutpaceError)


GOOD: list[tuple[str, Any]] = [
    ("temperature", 0),
    ("temperature", 1e-6),
    ("temperature", np.float32(0.5)),
    ("top_k", -1),
    ("top_k", 0),
    ("top_k", np.int64(3)),
    ("top_p", 1),
    ("min_p", 0),
    ("min_p", 1),
    ("typical_p", 1.0),
    ("presence_penalty", -2.0),
    ("frequency_penalty", 2),
    ("logit_bias", {3: -math.inf, 4: 100}),
    ("bad_words_ids", ((1, 2),)),
    ("min_tokens", 0),
    ("logprobs", 0),
    ("seed", -(2**63)),
    ("seed", 2**63 - 1),
    ("speculative", 0),
    ("speculative", "auto"),
    ("speculative", "off"),
]


@pytest.mark.parametrize(("name", "value"), GOOD, ids=str)
def test_the_ends_of_each_range_are_allowed(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


NUMPY: list[tuple[str, Any, Any]] = [
    ("seed", np.int64(7), 7),
    ("top_k", np.int32(5), 5),
    ("temperature", np.float64(0.5), 0.5),
    ("ignore_eos", np.True_, True),
    ("stop_token_ids", np.array([3, 4]), (3, 4)),
    ("stop_token_ids", torch.tensor([3, 4]), (3, 4)),
    ("stop_token_ids", [np.int64(3), torch.tensor(4)], (3, 4)),
    ("allowed_token_ids", {3}, (3,)),
    ("bad_words_ids", np.array([[1, 2]]), ((1, 2),)),
    ("logit_bias", {np.int64(3): np.float32(0.5)}, {3: 0.5}),
]


@pytest.mark.parametrize(("name", "value", "kept"), NUMPY, ids=lambda v: shown(v)[:24])
def test_numbers_of_numpy_and_torch_are_kept_as_pythons_own(
    name: str, value: Any, kept: Any
) -> None:
    found = getattr(SamplingParams(**{name: value}), name)
    assert (found, type(found)) == (kept, type(kept))
    inner = found if isinstance(found, tuple) else ()
    assert all(type(item) in (int, tuple) for item in inner)


@pytest.mark.parametrize("name", ["stop_token_ids", "logits_processors"])
def test_none_for_a_list_is_the_empty_list(name: str) -> None:
    assert getattr(SamplingParams(**{name: None}), name) == ()


def test_lists_are_kept_apart_from_the_callers() -> None:
    ends = [3]
    params = SamplingParams(stop_token_ids=ends)
    ends.append(4)
    assert params.stop_token_ids == (3,)


@pytest.mark.parametrize("option", options_of(SamplingParams), ids=lambda one: one.name)
def test_every_option_says_what_it_takes_and_does(option: Option) -> None:
    assert option.help
    for nonsense in (object(), {"a": object()}):
        with pytest.raises(ParamsError, match=option.name):
            option.read(nonsense)


def test_params_are_copied_and_shown_as_any_dataclass() -> None:
    params = SamplingParams(temperature=0.5, stop="a")
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, seed=3).seed == 3
    assert list(inspect.signature(SamplingParams).parameters)[:2] == ["n", "temperature"]


def test_equal_params_have_the_same_hash() -> None:
    params = [SamplingParams(logit_bias={1: 2.0, 3: -1.0}, stop=["a"]) for _ in range(2)]
    assert len({*params}) == 1
    assert len({*params, SamplingParams(logit_bias={1: 2.0})}) == 2


def test_options_are_given_by_name_only() -> None:
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[misc]


# -- unset options -------------------------------------------------------------------------------


@pytest.mark.parametrize("defaults", [{}, {"do_sample": False, "temperature": 0.7}])
def test_without_do_sample_the_text_is_greedy(defaults: dict[str, Any]) -> None:
    assert SamplingParams().resolve(defaults).greedy


def test_without_do_sample_a_temperature_asks_for_sampling() -> None:
    resolved = SamplingParams(temperature=0.6).resolve({"do_sample": False, "top_p": 0.9})
    assert (resolved.temperature, resolved.greedy, resolved.top_p) == (0.6, False, 0.9)


@pytest.mark.parametrize("defaults", [{}, {"temperature": None}])
def test_sampling_at_no_stated_temperature_is_at_one(defaults: dict[str, Any]) -> None:
    assert SamplingParams().resolve({"do_sample": True, **defaults}).temperature == 1.0


def test_with_do_sample_the_temperature_is_the_models() -> None:
    assert SamplingParams().resolve({"do_sample": True, "temperature": 0.7}).temperature == 0.7


def test_a_request_may_be_greedy_under_a_model_that_samples() -> None:
    assert SamplingParams(temperature=0).resolve({"do_sample": True, "temperature": 0.7}).greedy


INHERITED: list[tuple[str, str, Any]] = [
    ("top_k", "top_k", 7),
    ("top_p", "top_p", 0.8),
    ("min_p", "min_p", 0.1),
    ("typical_p", "typical_p", 0.5),
    ("repetition_penalty", "repetition_penalty", 1.3),
    ("bad_words_ids", "bad_words_ids", ((1,),)),
    ("max_tokens", "max_new_tokens", 99),
    ("min_tokens", "min_new_tokens", 3),
]


@pytest.mark.parametrize(("name", "theirs", "value"), INHERITED)
def test_an_unset_option_is_the_models(name: str, theirs: str, value: Any) -> None:
    assert getattr(SamplingParams().resolve({theirs: value}), name) == value


@pytest.mark.parametrize(("name", "theirs", "value"), INHERITED)
def test_a_set_option_is_the_requests(name: str, theirs: str, value: Any) -> None:
    mine = {"bad_words_ids": ((4,),), "top_k": 1, "max_tokens": 1, "min_tokens": 1}.get(name, 1.0)
    assert getattr(SamplingParams(**{name: mine}).resolve({theirs: value}), name) == mine


@pytest.mark.parametrize("defaults", [{}, {name: None for _, name, _ in INHERITED}])
def test_what_neither_states_is_off(defaults: dict[str, Any]) -> None:
    resolved = SamplingParams().resolve(defaults)
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0}
    assert {name: getattr(resolved, name) for name in off} == off
    assert (resolved.max_tokens, resolved.min_tokens, resolved.bad_words_ids) == (256, 0, None)


def test_options_that_a_generation_config_lacks_stay_as_asked() -> None:
    asked = SamplingParams(n=2, stop="x", seed=4, presence_penalty=0.5, speculative=3)
    resolved = asked.resolve({"n": 5, "seed": 9, "num_beams": 4})
    for name in ("n", "stop", "seed", "presence_penalty", "speculative", "logprobs"):
        assert getattr(resolved, name) == getattr(asked, name)


def test_a_whole_generation_config_resolves() -> None:
    config = GenerationConfig(do_sample=True, top_k=20, temperature=0.8, max_new_tokens=12)
    resolved = SamplingParams(top_p=0.5).resolve(config.to_dict())
    found = (resolved.temperature, resolved.top_k, resolved.top_p, resolved.max_tokens)
    assert found == (0.8, 20, 0.5, 12)


def test_resolving_twice_changes_nothing() -> None:
    once = SamplingParams(top_p=0.5).resolve({"do_sample": True, "temperature": 0.8})
    assert once.resolve({"do_sample": False, "top_k": 3, "top_p": 0.9}) == once


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(ParamsError, match="min_tokens=5 is more than max_tokens=4: lower"):
        SamplingParams(max_tokens=4, min_tokens=5)
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4
    with pytest.raises(ParamsError, match=r"min_tokens=300 is more than the 256 .* give max"):
        SamplingParams(min_tokens=300).resolve({})
    with pytest.raises(ParamsError, match="more than the 9 tokens"):
        SamplingParams(min_tokens=10).resolve({"max_new_tokens": 9})


def test_a_minimum_of_the_model_gives_way_to_the_longest_text() -> None:
    resolved = SamplingParams(max_tokens=4).resolve({"min_new_tokens": 7})
    assert (resolved.max_tokens, resolved.min_tokens) == (4, 4)
    with pytest.raises(ParamsError, match="min_tokens must be a whole number"):
        SamplingParams().resolve({"min_new_tokens": "x"})


def test_a_text_that_can_be_no_longer_asks_for_no_more() -> None:
    short = SamplingParams(max_tokens=9, min_tokens=6).shortened(4)
    assert (short.max_tokens, short.min_tokens) == (4, 4)
    assert SamplingParams(max_tokens=3).shortened(4) == SamplingParams(max_tokens=3)
    assert SamplingParams().shortened(4) == SamplingParams(max_tokens=4)


def test_a_bad_value_in_the_models_config_is_refused_too() -> None:
    with pytest.raises(ParamsError, match="top_p"):
        SamplingParams().resolve({"top_p": 1.5})


# -- from a mapping, and properties ----------------------------------------------------------------


def test_a_mapping_makes_the_same_params() -> None:
    options = {"temperature": 0.5, "stop": ["a"], "seed": 3}
    assert SamplingParams.from_dict(options) == SamplingParams(**options)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ParamsError, match=r"unknown sampling option 'temprature' \(did you mean"):
        SamplingParams.from_dict({"temprature": 0.5})


@pytest.mark.parametrize("make", [SamplingParams, lambda **o: SamplingParams.from_dict(o)])
def test_an_unknown_name_is_a_type_error_and_an_error_of_ours(make: Any) -> None:
    with pytest.raises(
        TypeError, match=r"'max_new_token' \(did you mean 'max_tokens'\?\)"
    ) as caught:
        make(max_new_token=3)
    assert isinstance(caught.value, ParamsError)


@pytest.mark.parametrize("options", [3, [("n", 1)], None])
def test_what_is_no_mapping_is_refused(options: Any) -> None:
    with pytest.raises(ParamsError, match="must be a dict"):
        SamplingParams.from_dict(options)


def test_a_name_like_no_other_is_refused_with_the_list() -> None:
    with pytest.raises(ParamsError, match=r"choose from .*temperature"):
        SamplingParams.from_dict({"zzz": 1})


@pytest.mark.parametrize(("stop", "strings"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b"))])
def test_stop_strings_are_a_tuple(stop: Any, strings: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (0.0, True), (1, False), (None, False)]
)
def test_greedy_is_temperature_zero(temperature: float | None, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy
