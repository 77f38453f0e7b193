"""Arguments of `LLM` and ways to speculate of every kind: an engine, or an error that tells."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from api.words import word_tokenizer
from fuzz.attack import ANYTHING, answered, examples
from outpace import LLM, SamplingParams
from outpace.config import COMMON
from outpace.core.options import described, options_of
from outpace.draft.registry import drafters
from outpace.verify.registry import rules
from targets.families import CONTEXT, drafter, target

PARAMS = SamplingParams(max_tokens=3, seed=1)
OPTIONS_OF = {
    name: [one.name for one in described(kind.Options)] for name, kind in drafters().items()
}
OPTIONS = sorted({name for names in OPTIONS_OF.values() for name in names})
RULE_OPTIONS = sorted({one.name for kind in rules().values() for one in options_of(kind)})


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


@st.composite
def ways(draw: st.DrawFn) -> dict[str, Any]:
    """Ways to speculate that hold together."""
    method = draw(st.sampled_from(list(drafters())))
    config: dict[str, Any] = {"method": method}
    if "model" in OPTIONS_OF[method]:
        config["model"] = drafter("llama")
    for name, values in (
        ("num_speculative_tokens", st.one_of(st.integers(0, 6), st.just("auto"))),
        ("verify", st.sampled_from(["match", "coupled", "token", "recursive", "typical"])),
    ):
        if draw(st.booleans()):
            config[name] = draw(values)
    return config


ODD_ENTRIES = st.one_of(
    st.dictionaries(st.sampled_from([*COMMON, *OPTIONS, "lookup"]), ANYTHING, max_size=1),
    st.fixed_dictionaries({"verify": RULES}),
    st.fixed_dictionaries({"num_speculative_tokens": st.integers(0, 10**6)}),
)


@examples(220)
@given(config=ways(), odd=st.one_of(st.just({}), ODD_ENTRIES))
def test_ways_to_speculate_of_every_kind(config: dict[str, Any], odd: dict[str, Any]) -> None:
    answered(lambda: text_of(speculative_config={**config, **odd}, max_model_len=32))


@examples(60)
@given(ANYTHING)
def test_speculative_configs_of_anything(config: Any) -> None:
    answered(lambda: text_of(speculative_config=config, max_model_len=32))


SOUND = {
    "tokenizer": st.just(word_tokenizer()),
    "dtype": st.sampled_from(["auto", "float64", "float32"]),
    "device": st.sampled_from(["auto", "cpu"]),
    "max_model_len": st.integers(8, CONTEXT),
    "max_num_seqs": st.integers(1, 5),
    "generation_config": st.sampled_from(["auto", "none"]),
    "trust_remote_code": st.booleans(),
    "cpu_kernels": st.sampled_from(["auto", "off"]),
}
# compile=True takes minutes.
ODD: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys([*SOUND, "quantization", "max_num_seq"], ANYTHING),
    "compile": ANYTHING.filter(lambda value: value is not True),
    "device": st.one_of(st.sampled_from(["cuda", "meta", "cpu:7"]), ANYTHING),
    "max_model_len": st.one_of(st.integers(-1, 200), ANYTHING),
}


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(list(SOUND)), unique=True))
    found = {name: draw(SOUND[name]) for name in names}
    if draw(st.booleans()):
        odd = draw(st.sampled_from(list(ODD)))
        found[odd] = draw(ODD[odd])
    return found


@examples(220)
@given(arguments())
def test_arguments_of_every_kind(given_arguments: dict[str, Any]) -> None:
    answered(lambda: text_of(**given_arguments))


@examples(60)
@given(ANYTHING)
def test_models_of_every_kind(model: Any) -> None:
    if model is not None:  # the bundled pair, which others test
        answered(lambda: text_of(model=model))
