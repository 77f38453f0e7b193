"""Texts of a given form from Python and from the command line, with drafts and without."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.audit.letters import LetterTokenizer, letter_model
from outpace.core.beam_params import BeamSearchParams
from outpace.errors import ParamsError

FORMS: dict[str, Any] = {
    "regex": "([ace][bdf]){2,3}",
    "choice": ["abc", "mmm", "fed"],
    "grammar": 'start: "a" /[b-d]+/ "m"',
}


def fits(kind: str, text: str) -> bool:
    if kind == "choice":
        return text in FORMS[kind]
    pattern = FORMS["regex"] if kind == "regex" else "a[b-d]+m"
    return re.fullmatch(pattern, text) is not None


def letters(**config: Any) -> LLM:
    return LLM(
        letter_model(),
        tokenizer=LetterTokenizer(),
        speculative_config=config,
        generation_config="none",
        max_model_len=64,
    )


@pytest.mark.parametrize("kind", FORMS)
def test_texts_have_the_form_and_are_those_of_plain_decoding(kind: str) -> None:
    params = [
        SamplingParams(
            temperature=temperature, seed=5, n=2, max_tokens=40, structured_outputs={kind: form}
        )
        for temperature in (0.0, 1.0)
        for form in (FORMS[kind],)
    ]
    prompts = [[1, 2, 3], [4, 5, 4, 5, 4]]
    found = []
    for method in ("none", "suffix"):
        llm = letters(method=method, **({} if method == "none" else {"verify": "coupled"}))
        found.append([one.text for each in llm.generate(prompts, params) for one in each.outputs])
    drafted, plain = found[1], found[0]
    assert all(fits(kind, text) for text in drafted + plain)
    assert drafted[:2] == plain[:2], "greedy texts"
    stream = "".join(chunk.text for chunk in llm.stream(prompts[0], params[1].shortened(40)))
    assert stream


def test_the_bundled_model_writes_json() -> None:
    years = {"type": "object", "properties": {"year": {"enum": [1999, 2026]}}, "required": ["year"]}
    schema = {**years, "additionalProperties": False}
    options = {"structured_outputs": {"json": schema}, "max_tokens": 200, "temperature": 0}
    text = LLM().generate("When did it begin? ", options)[0].text
    assert json.loads(text)["year"] in (1999, 2026)


@pytest.mark.parametrize(
    "form", ["json", 3, [], {}, {"xml": "a"}, {"json": {}, "regex": "a"}], ids=repr
)
def test_what_is_no_form_is_refused(form: Any) -> None:
    with pytest.raises(ParamsError, match="structured_outputs must be an object with one of json"):
        SamplingParams(structured_outputs=form)


def test_what_it_does_not_go_with() -> None:
    with pytest.raises(ParamsError, match="ignore_eos and structured_outputs exclude each other"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)
    with pytest.raises(ParamsError, match="structured_outputs does not go with a beam search"):
        BeamSearchParams(beam_width=2, structured_outputs={"regex": "a"})  # type: ignore[call-arg]
