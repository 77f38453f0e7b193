"""Arguments of `LLM` and ways to speculate of every kind: an engine, or an error that tells."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from api.words import word_tokenizer
from fuzz.attack import ANYTHING, answered, examples
from outpace import LLM, SamplingParams
from outpace.draft.registry import drafters
from outpace.verify.registry import rule_options, rules
from targets.families import drafter, target

PARAMS = SamplingParams(max_tokens=3, seed=1)
OPTIONS = sorted({name for kind in drafters().values() for name in kind.options})
RULE_OPTIONS = sorted({name for kind in rules().values() for name in rule_options(kind)})


def text_of(**arguments: Any) -> None:
    """Builds an engine and generates with it."""
    model = arguments.pop("model", target("llama"))
    LLM(model, **arguments).generate([[5, 6, 7, 5, 6], [9]], PARAMS)


RULES = st.one_of(
    st.sampled_from(list(rules())),
    st.builds(
        lambda name, options: {"name": name, **options},
        st.sampled_from(list(rules())),
        st.dictionaries(st.sampled_from(RULE_OPTIONS), ANYTHING, max_size=2),
    ),
    ANYTHING,
)
KNOWN = st.fixed_dictionaries(
    {"method": st.sampled_from(list(drafters()))},
    optional={
        "num_speculative_tokens": st.one_of(st.integers(0, 6), st.just("auto"), ANYTHING),
        "verify": RULES,
        "model": st.one_of(st.deferred(lambda: st.just(drafter("llama"))), ANYTHING),
    },
)


@examples(160)
@given(
    config=st.one_of(KNOWN, ANYTHING),
    odd=st.dictionaries(st.sampled_from([*OPTIONS, "lookup"]), ANYTHING, max_size=2),
)
def test_ways_to_speculate_of_every_kind(config: Any, odd: dict[str, Any]) -> None:
    config = {**config, **odd} if isinstance(config, dict) else config
    answered(lambda: text_of(speculative_config=config, max_model_len=32))


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "tokenizer": st.one_of(st.just(word_tokenizer()), ANYTHING),
        "dtype": st.one_of(st.sampled_from(["auto", "float64", "float33"]), ANYTHING),
        "device": st.one_of(st.sampled_from(["auto", "cpu", "cuda", "meta", "cpu:7"]), ANYTHING),
        "max_model_len": st.one_of(st.integers(0, 200), ANYTHING),
        "max_num_seqs": st.one_of(st.integers(0, 5), ANYTHING),
        "generation_config": st.one_of(st.sampled_from(["auto", "none"]), ANYTHING),
        "trust_remote_code": ANYTHING,
        "cpu_kernels": st.one_of(st.sampled_from(["auto", "off", "native"]), ANYTHING),
        "compile": ANYTHING.filter(lambda value: value is not True),  # takes minutes
        "quantization": st.one_of(st.sampled_from(["int8", "int4"]), ANYTHING),
        "max_num_seq": ANYTHING,
    },
)


@examples(160)
@given(ARGUMENTS)
def test_arguments_of_every_kind(arguments: dict[str, Any]) -> None:
    answered(lambda: text_of(**arguments))


@examples(60)
@given(ANYTHING)
def test_models_of_every_kind(model: Any) -> None:
    if model is not None:  # the bundled pair, which others test
        answered(lambda: text_of(model=model))
