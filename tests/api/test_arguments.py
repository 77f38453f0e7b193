"""The arguments of `LLM`, of `SpeculativeConfig` and of its methods: read, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from api.words import word_tokenizer
from outpace import LLM, SamplingParams, SpeculativeConfig, arguments
from outpace.core.options import options_of
from outpace.engine.scheduling_policies import SCHEDULING_POLICIES
from outpace.errors import ConfigError, ModelLoadError, OutpaceError, ParamsError, UnsupportedModel
from outpace.llm import BUNDLED
from targets.families import build, target

PROMPT = [5, 6, 7]
GREEDY = {"temperature": 0, "max_tokens": 4}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model must be a path, a hub name or a loaded model, not 5"),
    ({"tokenizer": "a/name"}, "tokenizer must be a loaded tokenizer, not 'a/name'"),
    ({"dtype": 32}, "dtype must be a name such as 'float32' or a torch.dtype, not 32"),
    ({"dtype": None}, "dtype must be"),
    ({"device": 0}, "device must be a name such as 'cpu' or a torch.device, not 0"),
    ({"max_num_seqs": "4"}, "max_num_seqs must be a whole number, not '4'"),
    ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
    ({"max_num_seqs": True}, "max_num_seqs must be a whole number, not True"),
    ({"max_model_len": "8"}, "max_model_len must be a whole number, not '8'"),
    ({"max_model_len": 8.0}, "max_model_len must be a whole number, not 8.0"),
    ({"max_model_len": 1}, "max_model_len must be at least 2, not 1"),
    ({"max_batch_total_tokens": "64"}, "max_batch_total_tokens must be a whole number, not '64'"),
    ({"generation_config": "foo"}, "generation_config must be 'auto' or 'none', not 'foo'"),
    ({"generation_config": None}, "generation_config must be 'auto' or 'none', not None"),
    ({"trust_remote_code": "no"}, "trust_remote_code must be True or False, not 'no'"),
    ({"trust_remote_code": 1}, "trust_remote_code must be True or False, not 1"),
    ({"compile": "false"}, "compile must be True, False or 'auto', not 'false'"),
    ({"progress": 5}, "progress must be a function of a step and its share, not 5"),
    ({"quantization": False}, "quantization must be 'int8' or 'int4', not False"),
    ({"cpu_kernels": None}, "cpu_kernels"),
    ({"cpu_kernels": ["auto"]}, "cpu_kernels"),
    ({"speculative_config": {1: 2}}, "the keys of speculative_config must be names, not 1"),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 1000}},
        "a whole number from 0 to 256, not 1000",
    ),
    ({"speculative_config": {"method": "ngram", "verify": {"name": 3}}}, "verify must be"),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": "5"}},
        "num_speculative_tokens must be 'auto' or a whole number from 0 to 256, not '5'",
    ),
    (
        {"speculative_config": {"method": "ngram", "prompt_lookup_max": 10**9}},
        "prompt_lookup_max must be at most 64, not 1000000000",
    ),
    ({"max_num_seq": 3}, "unknown argument of LLM 'max_num_seq' \\(did you mean 'max_num_seqs'"),
]


@pytest.mark.parametrize(
    ("config", "method", "drafter"),
    [
        (None, "auto", "suffix"),
        ({}, "auto", "suffix"),
        ({"num_speculative_tokens": 3}, "auto", "suffix"),
        ({"method": "none"}, "none", "none"),
    ],
)
def test_with_no_method_named_look_ups_draft(
    config: dict[str, Any] | None, method: str, drafter: str
) -> None:
    llm = LLM(target("llama"), speculative_config=config)
    assert (llm.config.method, llm.engine.drafter.name) == (method, drafter)


@pytest.mark.parametrize(
    ("more", "method"),
    [
        ({}, "auto"),
        ({"num_speculative_tokens": "auto", "verify": None}, "auto"),
        ({"num_speculative_tokens": 3}, "draft_model"),
        ({"num_assistant_tokens": 3}, "draft_model"),
        ({"length": "confidence"}, "draft_model"),
        ({"verify": "block"}, "draft_model"),
        ({"online": {}}, "draft_model"),
        ({"method": "draft_tree", "verify": "block"}, "draft_tree"),
    ],
)
def test_with_a_model_named_it_drafts_alone_or_beside_look_ups(
    more: dict[str, Any], method: str
) -> None:
    assert SpeculativeConfig.from_dict({"model": "small", **more}).method == method


def test_a_model_named_inside_another_method_drafts_alone() -> None:
    assert SpeculativeConfig.of_child({"model": "small"}).method == "draft_model"
    assert SpeculativeConfig.of_child({"method": "eagle3", "model": "small"}).method == "eagle3"
    assert SpeculativeConfig.of_child({}).method == "auto"


def test_the_bundled_drafter_drafts_alone() -> None:
    assert arguments.speculation(None, BUNDLED).method == "draft_model"
    assert arguments.speculation({"model": "other"}, BUNDLED).method == "draft_model"
    assert arguments.speculation({"model": "other"}, None).method == "auto"


def test_a_trained_head_drafts_by_its_own_method() -> None:
    head = BUNDLED / "heads" / "eagle3"
    three = {"model": str(head), "num_speculative_tokens": 3}
    assert arguments.speculation(three, None).method == "eagle3"
    assert arguments.speculation({"model": head, "verify": "typical"}, None).method == "eagle3"
    assert arguments.speculation({"model": head}, None).method == "auto"
    for of_bundled in ({"model": head}, three, {"method": "eagle3"}):
        config = arguments.speculation(of_bundled, BUNDLED)
        assert (config.method, str(config.options["model"])) == ("eagle3", str(head))
    assert arguments.speculation({"method": "draft_model", **three}, None).method == "draft_model"


def test_the_default_writes_what_plain_decoding_writes_and_drafts() -> None:
    prompt = [5, 6, 7, 8] * 6
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    default = LLM(target("llama")).generate([prompt], params)[0]
    plain = LLM(target("llama"), speculative_config={"method": "none"}).generate([prompt], params)
    assert default.token_ids == plain[0].token_ids
    assert default.metrics.num_draft_tokens > 0 == plain[0].metrics.num_draft_tokens


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED, ids=lambda v: str(v)[:40])
def test_an_argument_is_refused_by_name(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LLM(**{"model": target("llama"), **arguments})


def test_every_order_of_requests_can_be_asked_for() -> None:
    declared = next(
        one for one in options_of(arguments.EngineArgs) if one.name == "scheduling_policy"
    )
    assert list(get_args(declared.kind)) == list(SCHEDULING_POLICIES)


@pytest.mark.parametrize("name", ["max_model_len", "max_batch_total_tokens"])
def test_a_length_that_is_none_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("outpace.building.load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=f"{name} must be a whole number, not 'x'"):
        LLM(speculative_config={"method": "none"}, **{name: "x"})


def test_an_unknown_argument_is_a_type_error_too() -> None:
    with pytest.raises(TypeError, match=r"choose from .*max_model_len") as caught:
        LLM(swap_space=2)
    assert isinstance(caught.value, OutpaceError)
    with pytest.raises(TypeError, match="did you mean 'method'"):
        SpeculativeConfig(methd="ngram")  # type: ignore[call-arg]


def test_numbers_of_numpy_are_taken_like_pythons() -> None:
    config = {
        "method": "ngram",
        "num_speculative_tokens": np.int64(3),
        "prompt_lookup_max": np.int64(3),
    }
    llm = LLM(
        target("llama"),
        max_num_seqs=np.int64(2),
        max_model_len=np.int64(64),
        speculative_config=config,
    )
    params = SamplingParams(temperature=np.float64(0.9), seed=np.int64(7), max_tokens=4, n=2)
    expected = SamplingParams(temperature=0.9, seed=7, max_tokens=4, n=2)
    texts = [llm.generate(PROMPT, p)[0].outputs for p in (params, expected)]
    assert [o.token_ids for o in texts[0]] == [o.token_ids for o in texts[1]]
    assert texts[0][0].seed == 7


# -- sampling params -------------------------------------------------------------------------------


def test_sampling_params_may_be_a_dict_or_dicts() -> None:
    llm = LLM(target("llama"))
    (expected,) = llm.generate(PROMPT, SamplingParams(**GREEDY))
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected.token_ids
    several = llm.generate([PROMPT, PROMPT], [GREEDY, SamplingParams(**GREEDY)])
    assert [output.token_ids for output in several] == [expected.token_ids] * 2
    chunks = list(llm.stream(PROMPT, GREEDY))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 4
    assert llm.resolve(GREEDY).max_tokens == 4


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (3, "sampling_params must be SamplingParams, a dict, or a list of them, not 3"),
        ("greedy", "sampling_params must be SamplingParams, a dict"),
        ([3], "sampling options must be a dict, not 3"),
        ([], "1 prompts came with 0 sampling_params"),
        ({"temprature": 0}, "did you mean 'temperature'"),
        ({"temperature": "0"}, "temperature must be a number"),
    ],
)
def test_what_is_no_sampling_params_is_told_in_a_sentence(given: Any, sentence: str) -> None:
    with pytest.raises(ParamsError, match=sentence):
        LLM(target("llama")).generate([PROMPT], given)


# -- folders ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = build("llama")
    model.generation_config = GenerationConfig(do_sample=True, top_p=0.5)
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def change(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


@pytest.mark.parametrize("content", ["{oops", "[]", "", "\x00"])
def test_a_corrupt_generation_config_is_refused(folder: Path, content: str) -> None:
    file = folder / "generation_config.json"
    file.write_text(content)
    with pytest.raises(ModelLoadError, match=r"cannot read '.*generation_config\.json'.*delete it"):
        LLM(folder)
    file.unlink()
    assert LLM(folder).resolve().greedy


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"top_p": 1.5}, r"top_p must be a number in \(0, 1\], not 1\.5"),
        ({"temperature": "warm"}, r"temperature must be a number in \[0, inf\), not 'warm'"),
        ({"do_sample": "false"}, "do_sample must be True or False, not 'false'"),
    ],
)
def test_nonsense_in_a_generation_config_is_refused_at_load(
    folder: Path, entries: dict[str, Any], sentence: str
) -> None:
    change(folder / "generation_config.json", **entries)
    with pytest.raises(ConfigError, match=rf"generation_config.*{sentence}.*='none'"):
        LLM(folder)
    assert LLM(folder, generation_config="none").resolve().greedy


@pytest.mark.parametrize("layers", [0, -1, 2**40])
def test_a_model_with_a_damaged_number_of_layers_is_refused(folder: Path, layers: int) -> None:
    change(folder / "config.json", num_hidden_layers=layers, layer_types=None)
    with pytest.raises(UnsupportedModel, match=f"has {layers} layers by its config.json"):
        LLM(folder)


@pytest.mark.parametrize("classes", [[None], True, {"Llama": 1}])
def test_a_model_whose_classes_have_no_names_is_refused(folder: Path, classes: Any) -> None:
    change(folder / "config.json", architectures=classes)
    # Some versions of transformers and its parts notice it themselves.
    said = r"names of its classes in its config\.json|config\.json .* field 'architectures'"
    with pytest.raises((UnsupportedModel, ModelLoadError), match=said):
        LLM(folder)


def test_dtype_and_device_may_be_torchs_own(folder: Path) -> None:
    llm = LLM(folder, dtype=torch.float64, device=torch.device("cpu"))
    assert llm.target.dtype == torch.float64
