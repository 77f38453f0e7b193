"""Functions that a model may call: their schemas, and calls that clients demand and send back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from engine.test_spelling import extended
from engine.texts import writer
from outpace import LLM
from outpace.forms import json_schemas
from outpace.forms.json_schemas import LONGEST, SchemaChecker
from outpace.serve.openai.calls import Reader
from outpace.serve.openai.errors import ApiError
from outpace.serve.openai.tools import parameters_of
from outpace.serve.settings import Settings
from targets.vision_processors import llava, llava_processor

from .conftest import MODEL, call, running

FUNCTION = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
OTHER = {"name": "clock", "parameters": {"type": "object", "properties": {}, "maxProperties": 0}}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": OTHER}]
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.city }}"
    "{% endfor %}\n{% endfor %}"
)
ITEMS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for name, value in c.function.arguments.items() %} {{ name }}{% endfor %}"
    "{% endfor %}{% endfor %}"
)
WRITTEN = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def client(llm: LLM) -> Any:
    known = llm.tokenizer.chat_template
    llm.tokenizer.chat_template = TEMPLATE
    with running(llm) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as made:
        yield made
    llm.tokenizer.chat_template = known


def ask(
    client: openai.OpenAI, choice: Any, tools: Any = TOOLS, max_tokens: int = 150, **more: Any
) -> Any:
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "How is the weather in Rome?"}],
        tools=tools,
        tool_choice=choice,
        max_tokens=max_tokens,
        temperature=1.0,
        seed=1,
        **more,
    )


@pytest.mark.parametrize("speculative", ["off", 4])
def test_a_named_function_is_called(client: openai.OpenAI, speculative: Any) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    (choice,) = ask(client, named, extra_body={"speculative": speculative}).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    found = json.loads(call.function.arguments)
    assert found["city"] in ("Oslo", "Rome")
    assert found["days"] in (1, 2, 3)
    assert choice.message.content is None


def test_a_stream_counts_the_tokens_of_a_call_too(client: openai.OpenAI) -> None:
    """What is held back until a call is complete comes with it."""
    stream = ask(client, "required", stream=True, stream_options={"include_usage": True},
                 extra_body={"outpace": {"counts": True}})  # fmt: skip
    counted, written = 0, 0
    for event in stream:
        counted += (event.model_extra.get("outpace") or {}).get("tokens", 0)
        written = event.usage.completion_tokens if event.usage else written
    assert counted == written > 0


FORMS: dict[str, dict[str, Any]] = {
    "schema": {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object", "required": ["said"]}},
    },
    "object": {"type": "json_object"},
}


@pytest.mark.parametrize("name", [*FORMS, "choice"])
def test_a_model_calls_a_tool_or_answers_in_the_form(
    name: str, client: openai.OpenAI, llm: LLM
) -> None:
    """Its first character, which is made likely here, shows what it has chosen."""
    form = {"response_format": FORMS[name]} if name in FORMS else {}
    more: dict[str, Any] = {"extra_body": {"structured_outputs": {"choice": ["{yes}", "{no}"]}}}
    asked = {**form, **({} if form else more)}

    def answered(begin: str) -> Any:
        first = llm.token_ids(begin, False)[0]
        bias = {str(first): 40}
        return ask(client, "auto", max_tokens=400, logit_bias=bias, **asked).choices[0]

    called, said = answered("<"), answered("{")
    for one in called.message.tool_calls:
        assert one.function.name in ("weather", "clock")
        json.loads(one.function.arguments)
    assert (called.finish_reason, called.message.content) == ("tool_calls", None)
    assert said.message.tool_calls is None
    if name == "choice":
        assert said.message.content in ("{yes}", "{no}")
    elif said.finish_reason == "stop":
        assert isinstance(json.loads(said.message.content), dict)
    else:
        assert said.message.content.startswith("{")


def test_a_fault_of_form_or_tools_is_called_by_its_name(client: openai.OpenAI) -> None:
    odd = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strange"}}}
    with pytest.raises(openai.BadRequestError, match=r"response_format.json_schema.schema .*"):
        ask(client, "auto", response_format=odd)
    with pytest.raises(openai.BadRequestError, match="parameters of the function 'odd'"):
        ask(client, "auto", with_city({"not": {}}), response_format=FORMS["object"])


def test_arguments_are_an_object_whatever_a_schema_leaves_open() -> None:
    for schema in ({"properties": {"a": {}}}, {"description": "none"}, {}, None):
        assert parameters_of({"name": "f", "parameters": schema})["type"] == "object"


def test_tools_are_asked_of_the_template_that_is_used() -> None:
    """A vision-language model has two, and the processor's comes first."""
    processor = llava_processor()
    processor.tokenizer.chat_template = TEMPLATE
    reader = Reader(LLM(llava(), processor=processor), Settings(model_name="m"))
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    with pytest.raises(ApiError, match="template does not know tools"):
        reader.chat(asked)
    processor.chat_template = TEMPLATE
    processor.tokenizer.chat_template = None
    assert reader.chat(asked).parses_tools


def defining(name: str, cities: list[str]) -> dict[str, Any]:
    """Returns a function whose schema refers to its own parts, as those of nested Pydantic models
    do."""
    schema = {
        "$defs": {"City": {"enum": cities}},
        "type": "object",
        "properties": {
            "city": {"$ref": "#/$defs/City"},
            "then": {"$ref": "#/properties/city"},
        },
        "required": ["city", "then"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.mark.parametrize("wanted", ["north", "south"])
def test_a_demanded_call_keeps_to_the_definitions_of_its_own_schema(
    client: openai.OpenAI, wanted: str
) -> None:
    cities = {"north": ["Oslo", "Bodo"], "south": ["Rome", "Bari"]}
    tools = [defining(name, known) for name, known in cities.items()]
    named = {"type": "function", "function": {"name": wanted}}
    for choice in (named, "required"):
        (answer,) = ask(client, choice, tools).choices
        (call,) = answer.message.tool_calls
        found = json.loads(call.function.arguments)
        assert {found["city"], found["then"]} <= set(cities[call.function.name])


def test_one_call_only_where_a_call_is_demanded(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        (answer,) = ask(client, choice, parallel_tool_calls=False).choices
        assert len(answer.message.tool_calls) == 1
    assert ask(client, "none", parallel_tool_calls=False).choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="set tool_choice to 'required'") as found:
        ask(client, "auto", parallel_tool_calls=False)
    assert found.value.param == "parallel_tool_calls"


def test_parameters_that_no_grammar_follows_are_named(client: openai.OpenAI) -> None:
    strange = {"name": "odd", "parameters": {"properties": {"file": {"not": {"const": "a"}}}}}
    tools = [*TOOLS, {"type": "function", "function": strange}]
    words = "the parameters of the function 'odd' cannot be followed: .*not.*: leave it out"
    with pytest.raises(openai.BadRequestError, match=words) as bad:
        ask(client, "required", tools)
    assert bad.value.param == "tools[2].function.parameters"
    named = {"type": "function", "function": {"name": "weather"}}
    assert ask(client, named, tools).choices[0].message.tool_calls  # nobody is to call the other


class Upload(pydantic.BaseModel):
    path: Path
    content: bytes
    token: pydantic.SecretStr


def test_formats_that_nobody_knows_are_no_hindrance(client: openai.OpenAI) -> None:
    schema = Upload.model_json_schema()
    tools: Any = [{"type": "function", "function": {"name": "upload", "parameters": schema}}]
    for choice in ("required", {"type": "function", "function": {"name": "upload"}}):
        assert ask(client, choice, tools).choices[0].finish_reason
    assert client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hm?"}], max_tokens=2,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    ).choices[0].message.content == "{\""  # fmt: skip


def with_city(city: Any, name: str = "odd") -> list[dict[str, Any]]:
    """Returns tools, the last of which has a schema that is special deep inside."""
    inner = {"type": "object", "properties": {"city": city}}
    places = {"type": "array", "items": {"anyOf": [{"type": "null"}, inner]}}
    schema = {"type": "object", "properties": {"places": places}}
    return [*TOOLS, {"type": "function", "function": {"name": name, "parameters": schema}}]


@pytest.mark.parametrize(
    ("city", "words"),
    [
        ({"type": "strange"}, "Invalid type: strange"),
        ({"type": 5}, "type must be a string or array"),
        ({"properties": ["name"]}, "properties must be an object"),
        ({"minLength": "2"}, "Expected positive integer for 'minLength'"),
        ({"required": "name"}, "Expected array for 'required'"),
        ({"enum": 3}, "enum must be an array"),
        ({"pattern": "("}, "unclosed group"),
        ({"$ref": "#/$defs/City"}, "Pointer '/$defs/City' does not exist"),
        ("string", "schema must be an object or boolean"),
    ],
)
@pytest.mark.parametrize(
    "choice", [None, "auto", "required", {"type": "function", "function": {"name": "clock"}}],
    ids=["unset", "auto", "required", "named"],
)  # fmt: skip
def test_a_schema_that_is_malformed_anywhere_is_refused_by_the_name_of_its_function(
    client: openai.OpenAI, city: Any, words: str, choice: Any
) -> None:
    said = {} if choice is None else {"tool_choice": choice}
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hm?"}], max_tokens=2, stream=True,
            tools=with_city(city), **said,
        )  # type: ignore[call-overload]  # fmt: skip
    assert bad.value.param == "tools[2].function.parameters"
    begin = "the parameters of the function 'odd' are no sound JSON schema ("
    message = bad.value.body["message"]  # type: ignore[index]
    assert message.startswith(begin)
    assert words in message


@pytest.mark.parametrize(
    "city",
    [
        {"not": {"type": "string"}},
        {"uniqueItems": True},
        {"if": {}, "then": {}, "nullable": True},
        {"pattern": "(?=a)b"},
        {"$ref": "https://example.org/city"},
        {"type": "integer", "multipleOf": 9_999_991},
        False,
    ],
)
def test_a_sound_schema_that_no_grammar_follows_may_be_told_to_the_model(
    client: openai.OpenAI, city: Any
) -> None:
    assert ask(client, "auto", with_city(city), n=1).choices[0].finish_reason


def test_a_tool_is_looked_at_once(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    work = json_schemas._fault
    monkeypatch.setattr(json_schemas, "_fault", lambda text: looked.append(text) or work(text))
    for name in ("first", "second"):
        for _ in range(2):
            ask(client, "auto", with_city({"const": "looked at once"}, name))
    assert len(looked) == 1
    for _ in range(2):  # what is wrong is told each time
        with pytest.raises(openai.BadRequestError, match="Invalid type"):
            ask(client, "auto", with_city({"type": "odd"}))


def test_schemas_that_were_not_asked_about_lately_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_schemas, "KEPT", 2)
    schemas = SchemaChecker()
    assert schemas.faults([{"const": 1}, {"type": 1}, {"const": 2}, {"const": 3}]).keys() == {1}
    assert len(schemas._known) == 2


def test_what_would_end_the_process_or_is_no_json_is_told() -> None:
    """A chain of references, along which llguidance goes down, ended the process."""
    links = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(20_000)}
    chain = {"$defs": {**links, "d20000": {"type": "odd"}}, "$ref": "#/$defs/d0"}
    faults = SchemaChecker().faults([chain, {"const": {1}}, {"const": "a" * LONGEST}, {}])
    assert faults.keys() == {0, 1, 2}
    assert faults[0] == "Invalid type: odd"
    assert faults[1].startswith("it is no JSON")
    assert "1,048,576 are the most" in faults[2]


def test_a_message_may_be_sent_back_as_the_client_has_it(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    (called,) = ask(client, "required").choices
    messages.append(called.message.model_dump())
    result = {"role": "tool", "tool_call_id": called.message.tool_calls[0].id, "content": "sunny"}
    messages.append(result)
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    messages.append(answer.choices[0].message.model_dump())
    messages.append({"role": "user", "content": "And now?"})
    body: Any = {"functions": None, "function_call": None, "reasoning_effort": None}
    again = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=4, extra_body=body
    )
    assert again.choices[0].message.content


def test_some_function_is_called_in_a_stream(client: openai.OpenAI) -> None:
    (whole,) = ask(client, "required").choices
    deltas = [chunk.choices[0] for chunk in ask(client, "required", stream=True)]
    calls = [call for item in deltas for call in item.delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls] == [
        (0, whole.message.tool_calls[0].function.name)
    ]
    assert calls[0].function.arguments == whole.message.tool_calls[0].function.arguments
    assert deltas[-1].finish_reason == "tool_calls"


def test_the_model_may_choose_and_may_be_told_not_to(client: openai.OpenAI) -> None:
    assert ask(client, "auto").choices[0].finish_reason in ("stop", "length")
    assert ask(client, "none").choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="no tool"):
        ask(client, {"type": "function", "function": {"name": "other"}})


def history(arguments: Any) -> list[Any]:
    """Returns messages of which one is a call with these arguments."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]


def read(address: str, messages: list[Any]) -> str:
    """Returns what the model reads of messages; the bundled one has no line breaks."""
    status, body, _ = call(address, "/tokenize", {"messages": messages})
    assert status == 200, body
    return str(call(address, "/detokenize", {"tokens": body["tokens"]})[1]["prompt"])


@pytest.fixture
def address(client: openai.OpenAI) -> str:
    return str(client.base_url).removesuffix("/v1/")


def test_calls_and_their_results_are_told_to_the_template(address: str) -> None:
    for arguments in ('{"city": "Rome"}', {"city": "Rome"}):
        read_by_it = read(address, history(arguments))
        assert read_by_it == "user: Weather?assistant: weather Rometool: sunny"


@pytest.mark.parametrize("arguments", ["null", "", " \n", "{}", None])
def test_a_call_without_arguments_is_told_as_one_with_an_empty_object(
    address: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, arguments: Any
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", ITEMS)
    assert read(address, history(arguments)) == "weather"


@pytest.mark.parametrize("arguments", ["{", '{"x": NaN}', '{"x": 1e400}', "{}{}"])
def test_arguments_that_are_no_json_are_told_as_a_text(
    address: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", WRITTEN)
    assert read(address, history(arguments)) == f"weather {json.dumps(arguments)}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", ITEMS)
    status, body, _ = call(address, "/tokenize", {"messages": history(arguments)})
    assert (status, body["error"]["param"]) == (400, "messages")
    place = "give an object as messages[1].tool_calls[0].function.arguments, not "
    assert place in body["error"]["message"]


@pytest.mark.parametrize("arguments", ["[1, 2]", '"Rome"', "7", "true"])
def test_arguments_that_are_no_object_are_told_as_they_are(
    address: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", WRITTEN)
    assert read(address, history(arguments)) == f"weather {arguments}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", ITEMS)
    status, body, _ = call(address, "/tokenize", {"messages": history(arguments)})
    assert (status, body["error"]["param"]) == (400, "messages")
    place = "give an object as messages[1].tool_calls[0].function.arguments, not "
    assert place in body["error"]["message"]


def test_a_template_that_refuses_more_than_arguments_is_not_misread(
    address: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('no tools') }}")
    _, body, _ = call(address, "/tokenize", {"messages": history("[]")})
    assert "(no tools): check their roles and their order" in body["error"]["message"]


def test_reasoning_that_is_sent_back_reaches_the_template(
    address: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}: {{ m.content }}{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    messages = [{"role": "assistant", "reasoning_content": "the dog", "content": "the cat"}]
    assert read(address, messages) == "the dog: the cat"
    assert llm.tokenizer.decode(llm.chat_ids(messages)) == "the dog: the cat"
    cut = [{"role": "assistant", "reasoning_content": "the dog", "content": None}]
    assert read(address, cut).strip() == "the dog:"
    others = [{"role": "assistant", "reasoning": "the dog", "content": "the cat"}]  # vLLM's name
    assert read(address, others) == "the dog: the cat"


def test_a_refusal_that_is_sent_back_is_what_was_said(
    address: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    part = {"type": "refusal", "refusal": "the cat"}
    said: dict[str, Any]
    for said in ({"content": None, "refusal": "the cat"}, {"content": [part]}):
        assert read(address, [{"role": "assistant", **said}]) == "assistant: the cat"


def test_a_call_begins_and_ends_with_special_tokens() -> None:
    """As in the tokenizers of Hermes: answers leave out the others."""
    made = extended(special_calls=True)
    made.chat_template = TEMPLATE
    width = len(made)
    llm = LLM(writer(width), tokenizer=made, speculative_config={"method": "none"})
    said = json.dumps(json.dumps({"name": "weather", "arguments": {"city": "Rome"}}))
    grammar = f'start: "Hm." <|fim|> <tool_call> {said} </tool_call> "."'
    asked = {"messages": [{"role": "user", "content": "Hm?"}], "temperature": 0}
    with running(llm) as url:
        for stream in (False, True):
            forced = {"structured_outputs": {"grammar": grammar}, "tools": TOOLS, "stream": stream}
            assert answered(url, {**asked, **forced}) == (
                "Hm..", [("weather", '{"city": "Rome"}')], "tool_calls"
            )  # fmt: skip
        without = {"structured_outputs": {"grammar": grammar}}
        assert answered(url, {**asked, **without})[:2] == (f"Hm.{json.loads(said)}.", [])
        demanded = {"tools": with_city({"const": "Oslo"})[2:], "tool_choice": "required"}
        shortest = {"logit_bias": {made.convert_tokens_to_ids(one): 40 for one in '"}]'}}
        content, calls, reason = answered(url, {**asked, **demanded, **shortest})
    assert (content, [name for name, _ in calls], reason) == ("", ["odd"], "tool_calls")


def answered(url: str, body: Any) -> tuple[str, list[tuple[str, str]], str]:
    """Returns what is said, what is called and why it ended, of a stream or of a whole answer."""
    status, said, _ = call(url, "/v1/chat/completions", body)
    assert status == 200, said
    if not body.get("stream"):
        (choice,) = said["choices"]
        deltas = [choice["message"]]
    else:
        events = [line.removeprefix("data: ") for line in said.splitlines() if line]
        choices = [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
        choice, deltas = choices[-1], [one["delta"] for one in choices]
    calls = [one["function"] for delta in deltas for one in delta.get("tool_calls") or ()]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return text, [(one["name"], one["arguments"]) for one in calls], choice["finish_reason"]
