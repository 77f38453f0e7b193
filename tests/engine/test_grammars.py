"""Texts of a given form: the distribution at every node is the model's, cut to what the grammar
allows."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace import LLM
from outpace.core.logits.masks import TokenMask
from outpace.core.logits_pipeline import Branches, History, LogitsPipeline, RowOptions
from outpace.core.params import SamplingParams
from outpace.engine.request import EngineRequest
from outpace.errors import ConfigError, ParamsError
from outpace.forms.grammars import KEPT, Grammars

from .texts import END, SIZE, ids_of, text_decoder, tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "ok": {"type": "boolean"},
    },
    "required": ["id", "ok"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": "[a-f]{2,9}(-[0-9]{3})?"},
    {"choice": ["yes", "no", "maybe so"]},
    {"grammar": 'start: item ("," item)~3\nitem: /[A-Z]/ /[0-9]/'},
]


def follows(form: dict[str, Any], text: str) -> bool:
    if "json" in form:
        found = json.loads(text)
        return set(found) == {"id", "ok"} and 0 <= found["id"] <= 999
    if "choice" in form:
        return text in form["choice"]
    pattern = form.get("regex", "([A-Z][0-9],){3}[A-Z][0-9]")
    return re.fullmatch(pattern, text) is not None


def played(llm: LLM, form: dict[str, Any], **options: Any) -> list[EngineRequest]:
    params = {"max_tokens": 80, "seed": 5, "temperature": 1.0, **options}
    requests = llm.requests("go:", {**params, "structured_outputs": form})
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    return requests


@pytest.fixture(scope="module")
def coupled() -> LLM:
    return text_decoder(verify="coupled")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_have_the_form_and_are_those_of_plain_decoding(
    coupled: LLM, form: dict[str, Any], temperature: float
) -> None:
    fast = played(coupled, form, n=4, temperature=temperature)
    plain = played(coupled, form, n=4, temperature=temperature, speculative="off")
    assert [one.output_ids for one in fast] == [one.output_ids for one in plain]
    assert all(one.finish_reason == "stop" and follows(form, one.text) for one in fast)
    assert sum(one.metrics.num_accepted_tokens for one in fast) > 0
    assert sum(one.metrics.num_accepted_tokens for one in plain) == 0


@pytest.mark.parametrize("verify", ["token", "block", "traversal"])
def test_every_rule_keeps_to_the_form(verify: str) -> None:
    for form in FORMS[:2]:
        for one in played(text_decoder(verify=verify), form, n=3):
            assert one.finish_reason == "stop"
            assert follows(form, one.text)


def test_distributions_at_all_nodes_are_cut_by_their_own_history() -> None:
    grammar = Grammars(tokenizer(), SIZE, [END]).compile("regex", "ab(c|d)e?")
    token = {letter: tokenizer()(letter).input_ids[0] for letter in "abcdex"}
    paths = [[], ["a"], ["a", "b"], ["a", "x"], ["a", "b", "c"]]
    follow = ["a", "b", "cd", "", "e"]
    params = SamplingParams(temperature=1.0).resolve({"do_sample": True})
    pipeline = LogitsPipeline([RowOptions(params, mask=grammar.copy())], SIZE)
    width = max(map(len, paths))
    tokens = torch.tensor(
        [[[*(token[x] for x in path), *[0] * (width - len(path))] for path in paths]]
    )
    valid = torch.tensor([[[at < len(path) for at in range(width)] for path in paths]])
    torch.manual_seed(1)
    logits = torch.randn(1, len(paths), SIZE, dtype=torch.float64)
    probs = pipeline(logits, Branches(tokens, valid), History([[0]], [[]]))
    for node, letters in enumerate(follow):
        allowed = [token[letter] for letter in letters] + ([END] if letters == "e" else [])
        if not allowed:
            assert list(pipeline.dead_ends[0]) == [node]  # after a token that is forbidden
            continue
        expected = torch.zeros(SIZE, dtype=torch.float64)
        expected[allowed] = logits[0, node, allowed].softmax(-1)
        torch.testing.assert_close(probs[0, node], expected, rtol=0, atol=1e-12)


def test_a_grammar_goes_back_to_any_text() -> None:
    grammar = Grammars(tokenizer(), SIZE, [END]).compile("json", SCHEMA)
    ids = tokenizer()('{"id": 7, "ok": true}').input_ids
    fresh = [grammar.copy().allowed(ids[:at], [[]])[0] for at in range(len(ids) + 1)]
    torch.manual_seed(2)
    for at in torch.randint(0, len(ids) + 1, (60,)).tolist():
        split = at // 2
        found = grammar.allowed(ids[:split], [[], ids[split:at], [0], ids[split:at][:1]])
        assert torch.equal(found[1], fresh[at])
        assert torch.equal(found[0], fresh[split])


class Interrupted:
    """A matcher that is interrupted once it has gone back."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def rollback(self, tokens: int) -> None:
        self._matcher.rollback(tokens)
        raise KeyboardInterrupt


def test_an_interruption_leaves_a_grammar_where_it_says_that_it_is() -> None:
    grammar: Any = Grammars(tokenizer(), SIZE, [END]).compile("json", SCHEMA)
    ids = tokenizer()('{"id": 7, "ok": true}').input_ids
    expected = grammar.copy().allowed(ids[:4], [[]])
    grammar.allowed(ids[:12], [[]])
    grammar._matcher = Interrupted(grammar._matcher)
    with pytest.raises(KeyboardInterrupt):
        grammar.allowed(ids[:4], [[]])
    assert torch.equal(grammar.allowed(ids[:4], [[]]), expected)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "("}, "regex cannot be made a grammar"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"json": "{"}, "no JSON"),
        ({"json": {"type": "strange"}}, "Invalid type"),
        ({"choice": []}, "choice must be a list"),
        ({"regex": "a", "json_object": True}, "must be an object with one of"),
        ({"json_object": False}, "json_object must be true, not False"),
    ],
)
def test_what_is_no_form_is_refused(coupled: LLM, form: dict[str, Any], words: str) -> None:
    with pytest.raises(ParamsError, match=re.escape(words)):
        coupled.requests("go:", {"structured_outputs": form})


def test_a_library_that_says_no_reason_is_told_by_its_error(
    coupled: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(kind: str, value: Any) -> str:
        raise ValueError

    monkeypatch.setattr("outpace.forms.grammars._source", fails)
    with pytest.raises(ParamsError, match=r"cannot be made a grammar \(ValueError\)"):
        coupled.requests("go:", {"structured_outputs": {"regex": "a"}})


def test_a_grammar_beyond_the_librarys_limits_is_told_as_what_it_is(coupled: LLM) -> None:
    rules = "\n".join(f'r{number}: "ab"' for number in range(6000))
    names = " | ".join(f"r{number}" for number in range(6000))
    (request,) = played(coupled, {"grammar": f"start: {names}\n{rules}"})
    assert request.finish_reason == "error"
    assert "cannot be followed further (parser error: Too many items" in str(request.error)
    assert "simplify it" in str(request.error)


class GivesUp(TokenMask):
    """Allows everything, and can say nothing after one token."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.failures = 0

    def allowed(self, output: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        if any(self.token in [*output, *path] for path in paths):
            self.failures += 1
            raise ValueError("too complex")
        return torch.ones(len(paths), SIZE, dtype=torch.bool)


@pytest.mark.parametrize("verify", ["match", "coupled"])
def test_a_mask_that_fails_where_the_text_never_comes_ends_no_text(verify: str) -> None:
    llm = text_decoder("ngram", prompt_lookup_min=1, verify=verify)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    texts, masks = [], []
    for options in (params, replace(params, speculative="off")):
        (request,) = llm.requests("go:go:", options)
        masks.append(GivesUp(ids_of("g")[0]))
        request.options = replace(request.options, mask=masks[-1])
        llm.engine.add(request)
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
        assert request.error is None
        texts.append(request.output_ids)
    assert texts[0] == texts[1]
    assert [mask.failures > 0 for mask in masks] == [True, False]


def test_a_grammar_that_gave_up_answers_for_other_texts(coupled: LLM) -> None:
    rules = "\n".join(f'r{number}: "ab"' for number in range(6000))
    names = " | ".join(f"r{number}" for number in range(6000))
    grammar = coupled.requests(
        "go:", {"structured_outputs": {"grammar": f'start: "b" | "c" "d" ({names})\n{rules}'}}
    )
    mask = grammar[0].options.mask
    assert mask is not None
    after_d = ids_of("cd")
    with pytest.raises(ValueError, match="items"):
        mask.allowed([], [after_d])
    (allowed,) = mask.allowed([], [[]])
    assert allowed[ids_of("b")].all()


def test_thousands_of_choices_are_one_terminal(coupled: LLM) -> None:
    choices = [f"label {number}" for number in range(5000)]
    (request,) = played(coupled, {"choice": choices})
    assert request.finish_reason == "stop"
    assert request.text in choices


@pytest.mark.parametrize("kind", ["json", "grammar"])
def test_a_long_chain_of_references_does_not_end_the_process(coupled: LLM, kind: str) -> None:
    """In a process of its own, which llguidance ended: it goes down along them."""
    count = 20_000
    if kind == "json":
        links = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(count)}
        form: Any = {"$defs": {**links, f"d{count}": {"enum": [1]}}, "$ref": "#/$defs/d0"}
    else:
        form = "start: a0\n" + "\n".join(f"a{at}: a{at + 1}" for at in range(count))
        form += f'\na{count}: "1"'
    (request,) = played(coupled, {kind: form})
    assert request.text == "1"


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (
            {"json": {"type": "integer", "multipleOf": 9_999_991}},
            "multiple above 100,000",
        ),
        ({"json": {"items": [{"anyOf": [{"multipleOf": 200_000.5}]}]}}, "least common multiple"),
        ({"grammar": 'start: %json {"multipleOf": 123456}'}, "least common multiple"),
        ({"grammar": 'start: %json   {"\\u006dultipleOf": 123456}'}, "least common multiple"),
        ({"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}}, "least common multiple"),
        (
            {"json": {"enum": [{"multipleOf": 10**9 + 2 * at + 1} for at in range(30_000)]}},
            "least common multiple",
        ),
        ({"json": {"multipleOf": 10**400}}, "least common multiple"),
        ({"json": {"const": {1, 2}}}, "is no JSON"),
        ({"regex": "a" * 2_000_000}, "regex has 2,000,000 characters, and 1,048,576 are the most"),
    ],
)
def test_what_would_take_minutes_is_refused(coupled: LLM, form: dict[str, Any], words: str) -> None:
    with pytest.raises(ParamsError, match=re.escape(words)):
        coupled.requests("go:", {"structured_outputs": form})


NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
ITEMS = {"type": "array", "items": {"$ref": "#/$defs/a%20b"}, "minItems": 1}
OR_NULL = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "endless"),
    [
        (NODE, "an object"),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": ITEMS}}, "'#/$defs/a%20b'"),
        ({"allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": {"$ref": "#/$defs/n"}}}, "'#/$defs/n'"),
        ({"oneOf": [NODE, {"$ref": "#/$defs/n"}], "$defs": {"n": NODE}}, "'#/$defs/n'"),
        ({**NODE, "type": ["object", "null"]}, None),
        ({**NODE, "required": []}, None),
        ({**NODE, "properties": {"next": OR_NULL}}, None),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {**ITEMS, "minItems": 0}}}, None),
        (
            {"type": "object", "properties": {"list": {"$ref": "#/$defs/x"}}, "$defs": {"x": NODE}},
            None,
        ),
    ],
)
def test_a_schema_that_no_text_ends_is_refused(
    coupled: LLM, schema: dict[str, Any], endless: str | None
) -> None:
    """Such as a node of a list that has to name the next one: texts would go on to the last of
    their tokens, and be no JSON."""
    for form in ({"json": schema}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        if endless is None:
            assert coupled.requests("go:", {"structured_outputs": form})
        else:
            with pytest.raises(ParamsError, match=f"asks for {re.escape(endless)}, which always"):
                coupled.requests("go:", {"structured_outputs": form})


def test_usual_multiples_are_followed(coupled: LLM) -> None:
    price = {"type": "number", "multipleOf": 0.01, "minimum": 1, "maximum": 2}
    properties = {"price": price, "tax": {**price, "multipleOf": 0.5}, "count": {"multipleOf": 7}}
    assert coupled.requests("go:", {"structured_outputs": {"json": {"properties": properties}}})
    assert coupled.requests(
        "go:", {"structured_outputs": {"json": {"type": "number", "multipleOf": 0.000001}}}
    )


def test_without_the_library_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(ConfigError, match=r"need llguidance: pip install 'outpace\[serve\]'"):
        Grammars(tokenizer(), SIZE, [END]).compile("regex", "a")


def test_a_form_is_compiled_once_and_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compiled = Grammars(tokenizer(), SIZE, [END]), []
    work = grammars._compiled
    monkeypatch.setattr(
        grammars, "_compiled", lambda kind, form: compiled.append(form) or work(kind, form)
    )
    first = grammars.compile("regex", "ab+")
    assert grammars.compile("regex", "ab+") is first
    for number in range(KEPT):
        grammars.compile("regex", f"a{number}")
    assert len(compiled) == KEPT + 1
    assert grammars.compile("regex", "ab+") is not first
    assert threading.stack_size() == 0  # other threads have the usual stack


def test_forms_are_compiled_by_several_threads(coupled: LLM) -> None:
    def first(number: int) -> list[int]:
        letter = "abcde"[number % 5]
        (request,) = coupled.requests(
            "go:", {"structured_outputs": {"regex": f"{letter}{{{number % 3 + 1}}}"}}
        )
        assert request.options.mask is not None
        allowed: list[int] = request.options.mask.allowed([], [[]])[0].nonzero()[:, 0].tolist()
        return allowed

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(first, range(40)))
    assert found == [tokenizer()("abcde"[number % 5]).input_ids for number in range(40)]


def test_a_text_without_an_end_has_no_form(coupled: LLM) -> None:
    with pytest.raises(ParamsError, match="ignore_eos"):
        coupled.requests("go:", {"ignore_eos": True, "structured_outputs": {"regex": "a"}})
