"""Values that were found by chance once: each is refused in one sentence that names a remedy."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from fuzz.attack import check_sentence
from outpace import LLM, SamplingParams, hf
from outpace.audit.letters import LetterTokenizer, letter_model
from outpace.core.options import described
from outpace.draft.registry import drafters
from outpace.errors import ConfigError, OutpaceError
from outpace.train.settings import TrainSettings
from targets.families import drafter, target


def refused(call: Any) -> str:
    with pytest.raises(OutpaceError) as caught:
        call()
    check_sentence(str(caught.value))
    return str(caught.value)


def test_an_empty_name_is_no_model() -> None:
    assert "name is empty" in refused(lambda: LLM(""))


@pytest.mark.parametrize("form", ["json", 3, ["a"], {}, {"xml": "a"}, {"json": {}, "regex": "a"}])
def test_what_is_no_form_of_a_text(form: Any) -> None:
    llm = LLM(target("llama"))
    assert "structured_outputs must be an object" in refused(
        lambda: llm.requests([1, 2], {"structured_outputs": form})
    )


@pytest.mark.parametrize("folder", [5, None, b"x", "", ["a"], {"a": 1}], ids=repr)
def test_what_is_no_folder_for_a_drafter(folder: Any) -> None:
    assert "path of a folder" in refused(lambda: LLM(target("llama")).save_drafter(folder))


@pytest.mark.parametrize("method", ["draft_model", "draft_tree", "auto"])
@pytest.mark.parametrize("model", [5, b"x", ["a"], True, {"a": 1}], ids=repr)
def test_what_is_no_draft_model(method: str, model: Any) -> None:
    config = {"method": method, "model": model}
    assert "model must be" in refused(lambda: LLM(target("llama"), speculative_config=config))
    assert "model must be" in refused(lambda: hf.speculative(model, method=method))


@pytest.mark.parametrize("name", ["tokenizer", "drafter_tokenizer"])
def test_what_is_no_tokenizer_for_generate(name: str) -> None:
    given: dict[str, Any] = {name: 5}
    assert "loaded tokenizer" in refused(lambda: hf.speculative(drafter("llama"), **given))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(one.name, value, id=f"{value!r}-{one.name}")
        for value in (None, "x", b"x", [1], True, float("nan"))
        for one in dataclasses.fields(TrainSettings)
        if one.name != "method" and one.default != value
    ],
)
def test_training_is_told_what_it_cannot_do_with(name: str, value: Any) -> None:
    if value == "x" and name in ("start", "draft"):
        return
    with pytest.raises(ConfigError):
        TrainSettings(method="medusa", **{name: value})


@pytest.mark.parametrize("branching", [[10**9], [10**30, 2], [100] * 20, 10**30], ids=str)
def test_a_huge_tree_is_refused_before_it_is_built(branching: Any) -> None:
    config = {"method": "draft_tree", "model": target("llama"), "branching": branching}
    assert "branching" in refused(lambda: LLM(target("llama"), speculative_config=config))


@pytest.mark.parametrize(
    "chat",
    [torch.ones(3), [torch.ones(3)], [[{"role": "user", "content": "he"}], torch.ones(2, 2)]],
    ids=["alone", "in a list", "beside a chat"],
)
def test_a_tensor_is_no_chat(chat: Any) -> None:
    refused(lambda: LLM(target("llama")).chat(chat))


@pytest.mark.parametrize(
    "kernels",
    [object(), {}, 3, b"native", torch.ones(2), float("nan")],
    ids=lambda k: type(k).__name__,
)
def test_an_odd_choice_of_kernels(kernels: Any) -> None:
    assert "cpu_kernels" in refused(lambda: LLM(target("llama"), cpu_kernels=kernels))


@pytest.mark.parametrize("size", [0, -1, 10**30])
def test_a_head_dim_that_no_model_has(size: int, tmp_path: Path) -> None:
    target("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_dim": size}))
    sentence = refused(lambda: LLM(tmp_path))
    assert sentence.rstrip().endswith("."), sentence
    assert any(word in sentence for word in ("download", "save", "set ", "choose")), sentence


@pytest.mark.parametrize("rows", [1 << 17, 490_811_398, 1 << 63, 10**30])
def test_more_rows_than_any_machine_has(rows: int) -> None:
    assert "max_num_seqs" in refused(lambda: LLM(target("llama"), max_num_seqs=rows))


class Odd:
    """Something that says more of itself than a sentence can hold."""

    def __repr__(self) -> str:
        return "a repr\nof two lines"


OPTIONS = [
    (method, one.name) for method, kind in drafters().items() for one in described(kind.Options)
]


@pytest.mark.parametrize(("method", "name"), OPTIONS)
def test_an_odd_object_for_each_option_of_each_drafter(method: str, name: str) -> None:
    needed = {"model": drafter("llama")} if (method, "model") in OPTIONS else {}
    refused(
        lambda: LLM(
            target("llama"),
            speculative_config={**needed, "method": method, name: Odd()},
            max_model_len=32,
        )
    )


def test_a_text_between_two_drafts_that_the_tokenizer_leaves_out() -> None:
    config = {"method": "ngram", "verify": {"name": "reflective", "prompt": "\u200b"}}
    said = refused(
        lambda: LLM(letter_model(), tokenizer=LetterTokenizer(), speculative_config=config)
    )
    assert "makes no token" in said


def test_a_bad_word_that_the_tokenizer_leaves_out() -> None:
    llm = LLM(letter_model(), tokenizer=LetterTokenizer(), generation_config="none")
    said = refused(lambda: llm.generate("a", SamplingParams(bad_words=["b", "\u200b"])))
    assert "bad_words holds '\\u200b'" in said


@pytest.mark.parametrize("text", [5, ["a"], b"a", None])
def test_what_is_no_text_has_no_token_ids(text: Any) -> None:
    llm = LLM(letter_model(), tokenizer=LetterTokenizer(), generation_config="none")
    assert "one text was expected" in refused(lambda: llm.token_ids(text))


@pytest.mark.parametrize("priority", ["x", None, float("nan"), float("inf"), 10**400])
def test_a_priority_that_no_queue_can_order(priority: Any) -> None:
    llm = LLM(letter_model(), tokenizer=LetterTokenizer(), generation_config="none")
    assert "priority must be" in refused(lambda: llm.requests("a", priority=priority))


def test_a_token_id_of_thousands_of_digits() -> None:
    llm = LLM(letter_model(), tokenizer=LetterTokenizer(), generation_config="none")
    said = refused(lambda: llm.generate("a", SamplingParams(stop_token_ids=[10**5000])))
    assert "stop_token_ids holds" in said


def test_a_prompt_that_is_too_long_is_told_by_us_alone(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM()
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        said = refused(lambda: llm.generate("x " * 3000))
    finally:
        logger.removeHandler(caplog.handler)
    assert "shorten the prompt" in said
    assert not caplog.records
