"""What the official client of OpenAI's API does every day."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from engine.tokenizers_made import pieces
from outpace import LLM, SamplingParams
from outpace.draft.registry import find_drafter
from outpace.errors import ConfigError
from outpace.serve.openai.calls import Reader
from outpace.serve.openai.errors import ApiError
from outpace.serve.openai.schemas import MOST_TOKENS
from outpace.serve.settings import Settings
from targets.families import build

from .conftest import MODEL, call, running

ASKED: list[Any] = [{"role": "user", "content": "Tell me about a cat."}]
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[str]:
    with running(llm) as found:
        yield found


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_completion_is_what_the_engine_says(client: openai.OpenAI, address: str) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=0, logprobs=2
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    found = choice.logprobs
    assert found is not None
    assert "".join(found.tokens or []) == choice.text
    assert [len(probs) for probs in found.top_logprobs or []] == [2] * 12
    _, counted, _ = call(address, "/tokenize", {"prompt": "Once upon a time"})
    assert counted["count"] == answer.usage.prompt_tokens


def test_tokens_of_a_chat_have_the_special_tokens_of_its_template(address: str) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert call(address, "/tokenize", chat)[0] == 200
    status, answer, _ = call(address, "/tokenize", {**chat, "add_special_tokens": False})
    assert status == 400
    assert answer["error"]["param"] == "add_special_tokens"


def test_completions_of_several_prompts_and_token_ids(client: openai.OpenAI) -> None:
    together = client.completions.create(
        model=MODEL, prompt=["One day", "The dog"], n=2, max_tokens=5, seed=3, temperature=1
    )
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    alone = [
        client.completions.create(
            model=MODEL, prompt=prompt, n=2, max_tokens=5, seed=3, temperature=1
        )
        for prompt in ("One day", "The dog")
    ]
    texts = [choice.text for answer in alone for choice in answer.choices]
    assert [choice.text for choice in together.choices] == texts
    assert len(set(texts)) > 1
    ids = client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=2)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


def test_a_streamed_completion(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": "Lily", "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**options, logprobs=1)
    chunks = list(
        client.completions.create(
            **options, logprobs=1, stream=True, stream_options={"include_usage": True}
        )
    )
    *pieces, last = chunks
    assert last.usage == whole.usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    tokens = [token for piece in pieces for token in piece.choices[0].logprobs.tokens]
    assert tokens == whole.choices[0].logprobs.tokens
    ends = [piece.choices[0].finish_reason for piece in pieces]
    assert ends == [*[None] * (len(pieces) - 1), whole.choices[0].finish_reason]
    assert len(pieces) > 3


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASKED, max_completion_tokens=9, logprobs=True, top_logprobs=3, seed=1
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    content = choice.logprobs.content
    assert "".join(token.token for token in content) == choice.message.content
    assert [len(token.top_logprobs) for token in content] == [3] * 9
    assert all(bytes(token.bytes).decode() == token.token for token in content)
    assert answer.model_extra["outpace"]["metrics"][0]["num_target_passes"] <= 9


def test_a_streamed_chat_and_its_stop_string(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 60, "temperature": 0}
    free = client.chat.completions.create(**options).choices[0].message.content
    assert free is not None
    stop = free[20:26]
    whole = client.chat.completions.create(**options, stop=[stop], n=2)
    assert whole.choices[0].message.content == free[: free.index(stop)]
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    texts = ["", ""]
    for chunk in client.chat.completions.create(**options, stop=stop, n=2, stream=True):
        for item in chunk.choices:
            texts[item.index] += item.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_many_at_once_through_the_asynchronous_client(address: str) -> None:
    prompts = [f"{name} had a {thing}" for name in ("Tom", "Anna") for thing in "abcdef"]

    async def ask() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:

            async def one(prompt: str, stream: bool) -> str:
                options: Any = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
                if not stream:
                    answer = await client.completions.create(model=MODEL, **options)
                    return answer.choices[0].text
                chunks = await client.completions.create(model=MODEL, **options, stream=True)
                return "".join([chunk.choices[0].text async for chunk in chunks])

            together = await asyncio.gather(*(one(p, i % 2 > 0) for i, p in enumerate(prompts)))
            return together, [await one(prompt, False) for prompt in prompts]

    together, alone = asyncio.run(ask())
    assert together == alone


def test_json_of_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Lily", "Tom"]}, "age": {"enum": [3, 14]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        max_tokens=100,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"name", "age"}
    regex = client.completions.create(
        model=MODEL, prompt="x", temperature=0, extra_body={"guided_regex": "(ab){2,3}"}
    )
    assert regex.choices[0].text in ("abab", "ababab")
    said = {"structured_outputs": {"choice": ["yes", "no"]}}
    choice = client.completions.create(model=MODEL, prompt="x", temperature=0, extra_body=said)
    assert choice.choices[0].text in ("yes", "no")


def test_speculation_of_one_request(client: openai.OpenAI) -> None:
    def drafted(speculative: Any) -> int:
        answer = client.completions.create(
            model=MODEL,
            prompt="Once upon a time",
            max_tokens=40,
            temperature=0,
            extra_body={"speculative": speculative},
        )
        return answer.model_extra["outpace"]["metrics"][0]["num_draft_tokens"]

    assert drafted("off") == 0
    assert drafted(3) > 0


@pytest.mark.parametrize("speculative", ["off", 1, 4])
def test_a_traced_stream_tells_how_every_token_came(
    client: openai.OpenAI, speculative: Any
) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt="Once upon a time",
            max_tokens=60,
            temperature=1.0,
            seed=4,
            logprobs=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"speculative": speculative, "outpace": {"trace": True}},
        )
    )
    said = [chunk.model_extra.get("outpace", {}) for chunk in chunks]
    rounds = [one for extra in said for one in extra.get("rounds", ())]
    tokens = [token for one in rounds for token in one["tokens"]]
    reported = [text for chunk in chunks[:-1] for text in chunk.choices[0].logprobs.tokens]
    assert [token["text"] for token in tokens] == reported
    assert len(tokens) == chunks[-1].usage.completion_tokens
    kept = [token for token in tokens if token["origin"] == "accepted"]
    assert len(kept) == said[-2]["metrics"]["num_accepted_tokens"]
    assert sum(len(one["path"]) for one in rounds) == len(kept)
    origins = {token["origin"] for token in tokens}
    assert origins == {"plain"} if speculative == "off" else {"accepted", "corrected"} <= origins
    for one in rounds:
        for place, node in enumerate(one["path"]):
            assert one["nodes"][node - 1]["id"] == one["tokens"][place]["id"]


def test_tokens_of_a_text_have_the_blanks_that_they_have_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a tokenizer that drops the blank in front of whatever it decodes."""
    tokenizer = pieces()
    llm = LLM(
        build("llama", vocab_size=len(tokenizer)),
        tokenizer=tokenizer,
        speculative_config={"method": "none"},
    )
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template, raising=False)
    words = {text: token for text, token in tokenizer.get_vocab().items() if text[0] == "\u2581"}
    shared = {"max_tokens": 5, "allowed_token_ids": list(words.values()), "logprobs": 1, "seed": 1}
    trace = {"stream": True, "outpace": {"trace": True}}
    with running(llm) as url:
        for prompt in ("the dog", llm.prompt_ids("the dog")):
            _, answer, _ = call(url, "/v1/completions", {"prompt": prompt, **shared})
            (choice,) = answer["choices"]
            assert choice["text"].startswith(" ")
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        _, events, _ = call(url, "/v1/completions", {"prompt": "the dog", **shared, **trace})
        said = [json.loads(one[6:]) for one in events.split("\n\n") if one.startswith("data: {")]
        rounds = [one for event in said for one in event["outpace"]["rounds"]]
        assert [one["tokens"][0]["text"] for one in rounds] == choice["logprobs"]["tokens"]
        chat = {**shared, "messages": [{"role": "user", "content": "the dog"}], "logprobs": True}
        _, answer, _ = call(url, "/v1/chat/completions", chat)
        assert answer["choices"][0]["message"]["content"] == choice["text"].removeprefix(" ")


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"temperature": -1}, "temperature", 400),
        ({"top_p": 0}, "top_p", 400),
        ({"logprobs": 21}, "logprobs", 400),
        ({"n": 0}, "n", 400),
        ({"n": 1000}, "n", 400),
        ({"best_of": 3}, "best_of", 400),
        ({"echo": True}, "echo", 400),
        ({"suffix": "end"}, "suffix", 400),
        ({"stop": 5}, "stop", 400),
        ({"stop": ["a"] * 65}, "stop", 400),
        ({"stop": ["b", "a" * 513]}, "stop[1]", 400),
        ({"stop": "a" * 513}, "stop", 400),
        ({"bad_words": ["a"] * 257}, "bad_words", 400),
        ({"bad_words": ["a" * 129]}, "bad_words[0]", 400),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids", 400),
        ({"allowed_token_ids": [1] * 262_145}, "allowed_token_ids", 400),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", 400),
        ({"logit_bias": {"cat": 1}}, "logit_bias", 400),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", 400),
        ({"priority": 3}, "priority", 400),
        ({"tempurature": 1}, "tempurature", 400),
        ({"stream_options": {"include_usage": True}}, "stream_options", 400),
        ({"guided_regex": "("}, "guided_regex", 400),
        ({"response_format": {"type": "xml"}}, "response_format.type", 400),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "structured_outputs", 400),
        ({"response_format": SCHEMA, "guided_json": {}}, "structured_outputs", 400),
        ({"response_format": SCHEMA, "structured_outputs": {"json": {}}},
         "structured_outputs", 400),
        ({"guided_json": {}, "structured_outputs": {"json": {}}}, "structured_outputs", 400),
        ({"response_format": {**SCHEMA, "type": "json_object"}}, "response_format", 400),
        ({"response_format": {**SCHEMA, "type": "text"}}, "response_format", 400),
        ({"outpace": {"trace": True}}, "outpace", 400),
        ({"outpace": {"counts": True}}, "outpace", 400),
        ({"prompt": ""}, "prompt", 400),
        ({"prompt": [1 << 40]}, "prompt", 400),
        ({"prompt": "word " * 600}, "prompt", 400),
        ({"model": "gpt-4"}, "model", 404),
        ({"speculative": "fast"}, "speculative", 400),
        ({"min_tokens": 3}, "min_tokens", 400),
        ({"prompt": None}, "prompt", 400),
        ({"prompt": ["a", 5]}, "prompt[1]", 400),
        ({"prompt": [5, "a"]}, "prompt[1]", 400),
        ({"prompt": [[5], [6, "a"]]}, "prompt[1][1]", 400),
        ({"\ud800": 1}, "\\ud800", 400),
        ({"user": "x" * 1025}, "user", 400),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(
    address: str, body: dict[str, Any], param: str, status: int
) -> None:
    found, answer, _ = call(address, "/v1/completions", {"prompt": "a", "max_tokens": 2, **body})
    assert (found, answer["error"]["param"]) == (status, param), answer
    assert len(answer["error"]["message"]) < 400


def test_an_error_names_its_field_whatever_words_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a form, for example, speaks of the model, which is a field, too."""
    llm = LLM(speculative_config={"method": "none"}, max_num_seqs=1)
    grammars = llm.input_processor._grammars_with(llm.input_processor.ends.of_texts)
    monkeypatch.setattr(grammars, "_eos_ids", [])  # as of a model without an end
    reader = Reader(llm, Settings(model_name=MODEL))
    form = {"type": "json_object"}
    for body, param in (
        ({"response_format": form}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"response_format": form, "ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"allowed_token_ids": [99999999]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "logit_bias": {"5": -math.inf}, "stream": True}, "logit_bias"),
    ):
        with pytest.raises(ApiError) as refused:
            reader.completion({"prompt": "a", "model": MODEL, **body})
        assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": [-1]}, "prompt[0] must be a token id, at least 0, not -1."),
        ({"prompt": [1.5]}, "prompt[0] must be a token id or a text or a list, not 1.5."),
        ({"prompt": [[]]}, "prompt[0] must not be empty."),
        ({"prompt": [[1, -1]]}, "prompt[0][1] must be a token id, at least 0, not -1."),
        ({"reasoning_effort": "low"}, "reasoning_effort is nothing that this server knows: leave"),
        ({"web_search_options": {}}, "web_search_options is nothing that this server knows: leave"),
        ({"max_token": 3}, "did you mean 'max_tokens'?"),
        ({"guided_json": {"type": "odd"}}, "guided_json cannot be made a grammar"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex cannot be made"),
        (
            {"guided_json": {"not": {}}},
            'guided_json holds what no grammar follows (Unimplemented keys: ["not"]): leave it out',
        ),
        ({"echo": True}, "echo is not offered by this server: leave it out"),
        ({"suffix": "end"}, "suffix is not offered by this server: leave it out"),
        (
            {"response_format": {**SCHEMA, "json_schema": {"schema": {"type": "odd"}}}},
            "response_format.json_schema.schema cannot be made a grammar",
        ),
    ],
)
def test_what_is_refused_is_said_in_the_clients_words(
    address: str, body: dict[str, Any], words: str
) -> None:
    _, answer, _ = call(address, "/v1/completions", {"prompt": "a", "max_tokens": 2, **body})
    assert words in answer["error"]["message"]


@pytest.mark.parametrize(
    "raw", [b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "outpace": {"x": 1, "x": 1}}']
)
def test_a_field_that_comes_twice_is_refused(address: str, raw: bytes) -> None:
    status, answer, _ = call(address, "/v1/completions", raw=raw)
    assert status == 400
    assert "twice in one object: send it once" in answer["error"]["message"]


@pytest.mark.parametrize("words", [1, 600])
def test_a_prompt_that_is_too_long_has_openais_code(address: str, words: int) -> None:
    body = {"prompt": "word " * words, "max_tokens": 2, "min_tokens": 3 if words == 1 else 0}
    _, answer, _ = call(address, "/v1/completions", body)
    assert answer["error"]["code"] == (None if words == 1 else "context_length_exceeded")


def test_a_wrong_word_is_refused_with_all_that_may_stand_there(address: str) -> None:
    body = {"prompt": "a", "speculative": "fast"}
    _, answer, _ = call(address, "/v1/completions", body)
    said = "speculative must be 'auto' or 'off' or a whole number, not 'fast'."
    assert answer["error"]["message"] == said


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 2}, "max_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "messages"),
        ({"response_format": {"type": "json_schema", "json_schema": None}}, "response_format"),
        ({"functions": []}, "functions"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "zzz"}}}],
          "tool_choice": "auto"}, "tools[0].function.parameters.type"),
    ],
)  # fmt: skip
def test_what_a_chat_cannot_honour(address: str, body: dict[str, Any], param: str) -> None:
    status, answer, _ = call(address, "/v1/chat/completions", {"messages": ASKED, **body})
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_what_openais_clients_send_by_themselves_changes_nothing(
    address: str, client: openai.OpenAI
) -> None:
    more: dict[str, Any] = {
        "prompt_cache_key": "a", "safety_identifier": "b", "modalities": ["text"],
        "metadata": {"c": "d"}, "store": False, "service_tier": "auto",
    }  # fmt: skip
    said = {"role": "assistant", "content": "A cat.", "annotations": [], "refusal": None}
    messages: Any = [*ASKED, said, *ASKED]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}
    plain, full = (client.chat.completions.create(**asked, **given) for given in ({}, more))
    assert plain.choices[0].message.content == full.choices[0].message.content
    status, _, _ = call(address, "/v1/chat/completions", {**asked, "top_logprobs": 0})
    assert status == 200
    for field, value in (("modalities", ["text", "audio"]), ("reasoning_effort", "low")):
        status, answer, _ = call(address, "/v1/chat/completions", {**asked, field: value})
        assert status == 400
        assert answer["error"]["param"].startswith(field)


def test_a_list_of_tokens_has_an_end(address: str) -> None:
    status, answer, _ = call(address, "/detokenize", {"tokens": [1] * (4 * MOST_TOKENS + 1)})
    assert (status, answer["error"]["param"]) == (400, "tokens")


def test_variables_of_a_chat_template_may_have_any_name(address: str) -> None:
    variables = {"name": "a", "tokenizer": "b", "for_template": 1, "enable_thinking": False}
    body = {"messages": ASKED, "max_tokens": 1, "chat_template_kwargs": variables}
    assert call(address, "/v1/chat/completions", body)[0] == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "a", "min_tokens": 5}, "min_tokens"),
        ({"guided_regex": "a", "max_tokens": 1, "min_tokens": 1, "logit_bias": {"0": 1}}, None),
        ({"guided_regex": "[0-9]", "allowed_token_ids": [0]}, "allowed_token_ids"),
        ({"guided_regex": "a", "bad_words": ["a"]}, "bad_words"),
        ({"guided_grammar": 'start: ""', "min_tokens": 1}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [0], "bad_words": ["a"]},
         "structured_outputs"),
        ({"guided_grammar": 'start: "a" <end> "b"'}, "guided_grammar"),
    ],
)  # fmt: skip
def test_a_form_that_the_options_leave_no_text_of_is_refused_before_a_stream_begins(
    address: str, llm: LLM, body: dict[str, Any], param: str | None
) -> None:
    end = f"<[{llm.target.eos_ids[0]}]>"
    said = json.loads(json.dumps(body).replace("<end>", end))
    sent = {"prompt": "a", "max_tokens": 9, "stream": True, **said}
    status, answer, _ = call(address, "/v1/completions", sent)
    if param is None:
        assert status == 200
        assert "error" not in answer
    else:
        assert (status, answer["error"]["param"]) == (400, param), answer


def test_an_error_on_the_way_ends_that_stream_alone(
    client: openai.OpenAI, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are too many texts of the form to look at all before."""
    ended: list[Any] = []
    remove = llm.engine.remove
    monkeypatch.setattr(
        llm.engine, "remove", lambda one: (ended.append(one.finish_reason), remove(one))
    )
    other = client.completions.create(
        model=MODEL, prompt="a", max_tokens=60, temperature=0, stream=True,
        extra_body={"guided_regex": "[a-z]{90}"},
    )  # fmt: skip
    first = next(other)
    options: Any = {"prompt": "a", "max_tokens": 60}
    options["extra_body"] = {"guided_regex": "[a-z]{9}", "min_tokens": 20}
    with pytest.raises(openai.BadRequestError, match="grammar"):
        client.completions.create(model=MODEL, **options)
    with pytest.raises(openai.APIError, match="together forbid every token"):
        list(client.completions.create(model=MODEL, **options, stream=True))
    assert first.choices[0].finish_reason is None
    assert [chunk.choices[0].finish_reason for chunk in other][-1] == "length"
    assert ended.count("error") == 2


def test_tokens_there_and_back(address: str) -> None:
    status, answer, _ = call(address, "/tokenize", {"prompt": "The cat sat.", "model": MODEL})
    assert (status, answer["count"]) == (200, len(answer["tokens"]))
    status, back, _ = call(address, "/detokenize", {"tokens": answer["tokens"]})
    assert (status, back) == (200, {"prompt": "The cat sat."})
    _, chat, _ = call(address, "/tokenize", {"messages": ASKED})
    assert chat["count"] > answer["count"]
    assert call(address, "/detokenize", {"tokens": [1 << 30]})[0] == 400


def test_the_second_turn_of_a_chat_reads_only_what_is_new(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a little red boat on a lake."}]
    first = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=40, temperature=0
    )
    said = first.choices[0].message.content
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    second = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=5, temperature=0
    )
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens <= cached < second.usage.prompt_tokens


def test_openapi_describes_every_endpoint(address: str) -> None:
    status, found, _ = call(address, "/openapi.json")
    assert status == 200
    assert {"/v1/completions", "/v1/chat/completions", "/metrics"} <= set(found["paths"])


def test_metrics_have_vllms_names(address: str) -> None:
    call(address, "/v1/completions", {"prompt": "a b c", "max_tokens": 30, "speculative": 3})
    _, text, _ = call(address, "/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = f'{{model_name="{MODEL}"}}'
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert float(values[f"outpace:spec_decode_{name}_total{label}"]) > 0
    assert float(values[f"outpace:generation_tokens_total{label}"]) >= 30
    assert float(values[f"outpace:time_to_first_token_seconds_count{label}"]) > 0


def test_a_port_in_use_is_told(llm: LLM, address: str) -> None:
    port = int(address.rpartition(":")[2])
    with pytest.raises(ConfigError, match="choose another"), running(llm, port=port):
        pass


def test_with_a_head_the_second_turn_of_a_chat_reads_its_new_tokens_only() -> None:
    plain = LLM(speculative_config={"method": "none"}, dtype="float64", max_model_len=512)
    head = find_drafter("eagle").dummy_options(plain.target)
    llm = LLM(
        speculative_config={"method": "eagle", "num_speculative_tokens": 3, **head},
        dtype="float64",
        max_num_seqs=2,
        enable_prefix_caching=True,
        max_model_len=512,
    )
    with running(llm) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:

        def answered(messages: list[Any]) -> Any:
            return client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=24, temperature=0
            )

        first = answered(ASKED)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        turns = [*ASKED, said, {"role": "user", "content": "And then?"}]
        second = answered(turns)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    expected = plain.chat(turns, SamplingParams(temperature=0, max_tokens=24))
    assert second.choices[0].message.content == expected.text


@pytest.mark.parametrize("parts", [False, True])
def test_predicted_outputs(parts: bool) -> None:
    llm = LLM(
        speculative_config={"method": "auto", "num_speculative_tokens": 8},
        dtype="float64",
        max_model_len=512,
    )
    plain = llm.chat(ASKED, SamplingParams(temperature=0, max_tokens=60, speculative="off"))
    expected = plain.text.replace(" was ", " is ", 1)
    halves = expected[:20], expected[20:]
    content: Any = [{"type": "text", "text": half} for half in halves] if parts else expected
    with running(llm) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        options: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 60, "temperature": 0}
        prediction: Any = {"type": "content", "content": content}
        answer = client.chat.completions.create(**options, prediction=prediction)
        without = client.chat.completions.create(**options)
        *_, last = client.chat.completions.create(
            **options,
            prediction=prediction,
            stream=True,
            stream_options={"include_usage": True},
        )
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**options, prediction={**prediction, "type": "text"})
    assert answer.choices[0].message.content == plain.text
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 5
    assert details.rejected_prediction_tokens >= 0
    assert last.usage.completion_tokens_details.accepted_prediction_tokens > 5
    assert without.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert refused.value.param == "prediction.type"


def test_a_server_without_a_look_up_refuses_predictions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="'auto', 'suffix' or 'ngram'") as refused:
        client.chat.completions.create(
            model=MODEL, messages=ASKED, prediction={"type": "content", "content": "A cat."}
        )
    assert refused.value.param == "prediction"
