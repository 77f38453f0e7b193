"""Conversations: one or several, contents as texts or parts, and what is said of other things."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from api.words import word_tokenizer
from outpace import LLM, RequestOutput, SamplingParams
from outpace.errors import PromptError
from outpace.inputs.chats import NO_VARIABLES, illustrated, with_text
from targets.families import target

GREEDY = SamplingParams(temperature=0, max_tokens=4)
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "w5 w6"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(target("llama"), tokenizer=word_tokenizer(), max_num_seqs=2)


def test_one_conversation_has_one_answer(llm: LLM) -> None:
    answer = llm.chat(ASKED, GREEDY)
    assert isinstance(answer, RequestOutput)
    assert answer.prompt_token_ids == [1, 5, 6]


def test_several_conversations_have_a_list_of_answers(llm: LLM) -> None:
    other = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w7"}]
    answers = llm.chat([ASKED, other], [GREEDY, {"temperature": 0, "max_tokens": 2}])
    assert [answer.prompt_token_ids for answer in answers] == [[1, 5, 6], [2, 9, 1, 7]]
    assert [len(answer.token_ids) for answer in answers] == [4, 2]
    assert answers[0].token_ids == llm.chat(ASKED, GREEDY).token_ids
    assert len(llm.chat([ASKED], GREEDY)) == 1


def test_parts_of_text_are_joined(llm: LLM) -> None:
    parts = [{"type": "text", "text": "w5"}, {"type": "text", "text": "w6"}]
    assert llm.chat_ids([{"role": "user", "content": parts}]) == llm.chat_ids(ASKED)


def test_other_keys_of_a_message_reach_the_template() -> None:
    template = "{% for m in messages %}{{ m['name'] }} {{ m['content'] or 'w4' }}{% endfor %}"
    llm = LLM(target("llama"), tokenizer=word_tokenizer(template))
    called = {"role": "assistant", "name": "w3", "content": None, "tool_calls": []}
    assert llm.chat_ids([called]) == [3, 4]


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ("w5", "a chat is a list of messages such as .*, not 'w5'"),
        (3, "a chat is a list of messages"),
        (None, "a chat is a list of messages"),
        ({"role": "user", "content": "w5"}, "a chat is a list of messages"),
        ([], "the chat is empty"),
        ([[]], "the chat is empty"),
        ([ASKED, "w5"], "or a list of such lists"),
        ([["w5"]], "a chat is a list of messages"),
        ([{"content": "w5"}], "a chat is a list of messages"),
        ([{"role": 3, "content": "w5"}], "a chat is a list of messages"),
        ([{"role": "user"}], "a text or a list of parts, not None"),
        ([{"role": "user", "content": 3}], "a text or a list of parts, not 3"),
        ([{"role": "user", "content": b"w5"}], "a text or a list of parts, not b'w5'"),
        ([{"role": "user", "content": ["w5"]}], "a part of a message is .*, not 'w5'"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "a part of type 'image_url', and outpace reads parts of type 'text' only",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "needs a text, not None"),
        ([{"role": "odd", "content": "w5"}], "refuses these messages \\(no odd role\\)"),
        ([{"role": "user", "content": "a\ud800"}], "not Unicode"),
    ],
    ids=str,
)
def test_what_is_no_chat_is_told_in_a_sentence(llm: LLM, messages: Any, sentence: str) -> None:
    with pytest.raises(PromptError, match=sentence):
        llm.chat(messages, GREEDY)


def test_what_a_template_refuses_may_be_a_variable() -> None:
    template = (
        "{% if effort == 'high' %}{{ raise_exception('no such effort') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    llm = LLM(target("llama"), tokenizer=word_tokenizer(template))
    assert llm.chat_ids(ASKED, effort="low") == [5, 6]
    with pytest.raises(PromptError, match=r"\(no such effort\): change 'effort', or leave it out"):
        llm.chat_ids(ASKED, effort="high")


def test_a_role_that_the_template_takes_for_the_user_is_refused() -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'ipython' %}w9 {% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    llm = LLM(target("llama"), tokenizer=word_tokenizer(template))
    assert llm.chat_ids([{"role": "ipython", "content": "w5"}]) == [9, 5]
    known = "'system' or 'developer' or 'user' or 'assistant' or 'tool'"
    with pytest.raises(PromptError, match=rf"messages\[1\].role must be {known}, not 'foo'\."):
        llm.chat([*ASKED, {"role": "foo", "content": "w5"}], GREEDY)


def test_a_template_that_wants_no_user_there_knows_the_role() -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' and loop.index0 % 2 %}"
        "{{ raise_exception('no user here') }}{% endif %}{{ m['content'] }} {% endfor %}"
    )
    llm = LLM(target("llama"), tokenizer=word_tokenizer(template))
    critic = {"role": "critic", "content": "w6"}
    assert llm.chat_ids([{"role": "user", "content": "w5"}, critic]) == [5, 6]


def test_without_a_template_there_is_no_chat() -> None:
    llm = LLM(target("llama"), tokenizer=word_tokenizer(template=None))
    with pytest.raises(PromptError, match="has no chat template: use generate"):
        llm.chat(ASKED)


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [(None, "a chat is a list of messages"), ([ASKED, ASKED], "one conversation was expected")],
    ids=str,
)
def test_the_prompt_of_a_chat_is_that_of_one_conversation(
    llm: LLM, messages: Any, sentence: str
) -> None:
    with pytest.raises(PromptError, match=sentence):
        llm.chat_ids(messages)


def test_a_template_may_call_its_variables_as_it_likes() -> None:
    template = "{{ name }} {{ tokenizer }} {% for m in messages %}{{ m['content'] }}{% endfor %}"
    llm = LLM(target("llama"), tokenizer=word_tokenizer(template))
    assert llm.chat_ids([{"role": "user", "content": "w5"}], name="w3", tokenizer="w4") == [3, 4, 5]
    other = "{{ messages[0]['content'] }} w9"
    assert llm.chat_ids([{"role": "user", "content": "w5"}], chat_template=other) == [5, 9]


@pytest.mark.parametrize("name", sorted(NO_VARIABLES - {"messages"}))
def test_what_is_made_of_a_templates_text_is_not_asked_of_it(llm: LLM, name: str) -> None:
    with pytest.raises(PromptError, match=f"'{name}' is no variable of a chat template"):
        llm.chat_ids(ASKED, **{name: False})


def test_every_argument_of_transformers_is_known_to_be_a_variable_or_none() -> None:
    known = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert known - NO_VARIABLES == {"self", "tools", "documents", "chat_template", "kwargs"}


CITY = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.city }} "
CITIES = CITY + "{% endfor %}{{ m.content }} {% endfor %}"


@pytest.mark.parametrize("arguments", ['{"city": "w5"}', {"city": "w5"}])
def test_arguments_of_calls_are_told_as_objects(arguments: Any) -> None:
    llm = LLM(target("llama"), tokenizer=word_tokenizer(CITIES))
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "w6", "tool_calls": [call], "refusal": None}]
    assert llm.chat_ids(messages) == [5, 6]
    assert call == {"function": {"name": "f", "arguments": arguments}}  # the caller's own
    assert with_text(messages[0])["tool_calls"] == illustrated(messages)[0][0]["tool_calls"]
    assert "refusal" not in with_text(messages[0])


def test_calls_in_other_forms_are_left_to_the_template() -> None:
    template = "{% for m in messages %}{{ m.tool_calls[0].arguments.city }}{% endfor %}"
    llm = LLM(target("llama"), tokenizer=word_tokenizer(template))
    call = {"name": "f", "arguments": {"city": "w5"}}
    assert llm.chat_ids([{"role": "assistant", "tool_calls": [call]}]) == [5]


def test_arguments_that_are_no_json_are_left_to_the_template() -> None:
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments }}{% endfor %}"
    llm = LLM(target("llama"), tokenizer=word_tokenizer(template))
    call = {"function": {"name": "f", "arguments": "w5 w6"}}
    assert llm.chat_ids([{"role": "assistant", "tool_calls": [call]}]) == [5, 6]
    large = {"function": {"name": "f", "arguments": '{"x": 1e400}'}}
    (kept,) = with_text({"role": "assistant", "tool_calls": [large]})["tool_calls"]
    assert kept["function"]["arguments"] == '{"x": 1e400}'


@pytest.mark.parametrize("calls", [5, True, "f()"])
def test_calls_that_are_no_list_are_named(calls: Any) -> None:
    llm = LLM(target("llama"), tokenizer=word_tokenizer(CITIES))
    with pytest.raises(PromptError, match=r"give a list as messages\[0\].tool_calls"):
        llm.chat_ids([{"role": "assistant", "content": "w6", "tool_calls": calls}])


def test_the_developer_is_told_under_the_name_that_the_template_knows() -> None:
    messages = [{"role": "developer", "content": "w5"}]
    plain = word_tokenizer("{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}")
    assert LLM(target("llama"), tokenizer=plain).chat_ids(messages) == [2, 5]
    newer = word_tokenizer("{% if messages[0].role == 'developer' %}w9{% endif %}")
    assert LLM(target("llama"), tokenizer=newer).chat_ids(messages) == [9]


def test_the_next_turn_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    llm = LLM(target("llama"), tokenizer=word_tokenizer(template), max_num_seqs=2)
    asked: list[Any] = []
    add = llm.engine.add
    monkeypatch.setattr(llm.engine, "add", lambda request: asked.append(request) or add(request))
    said = [{"role": "user", "content": "w5 w6 " * 10}]
    longer = [*said, {"role": "user", "content": "w7"}]
    llm.chat(said, GREEDY)
    llm.chat(longer, GREEDY)
    assert list(llm.stream(llm.chat_ids(longer), GREEDY, keep_cached=True))[-1].finish_reason
    llm.generate([llm.chat_ids(longer)], GREEDY)
    assert [request.cached_tokens for request in asked] == [0, 20, 20, 0]
