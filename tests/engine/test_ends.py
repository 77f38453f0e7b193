"""What ends texts, what ends answers in chats, and who says so; stop strings that are tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from outpace import LLM, SamplingParams
from outpace.errors import ParamsError
from outpace.inputs.prompts import ChatIds
from outpace.train.answers import prompts
from targets.families import build

from .texts import END, SIZE, tokenizer

OTHER, TURN, SHOWN, ASKS = range(SIZE, SIZE + 4)
NAMES = ["<other>", "<|turn|>", "<|shown|>", "<|asks|>"]
CHAT = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def chatting(template: str = TEMPLATE) -> Any:
    """Returns the tokenizer of bytes with a chat template, and the tokens that it needs."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer().backend_tokenizer.to_str()),
        eos_token="<end>",
        clean_up_tokenization_spaces=False,
    )
    made.add_tokens([AddedToken(name, special=name != "<|shown|>") for name in NAMES])
    made.chat_template = template
    return made


def chatter(eos: int | None = OTHER, template: str = TEMPLATE, method: str = "none") -> LLM:
    """Returns an LLM whose generation_config names one token, its tokenizer a second one, and its
    template a third."""
    model = build("llama", vocab_size=SIZE + 4)
    model.generation_config.eos_token_id = eos
    return LLM(model, tokenizer=chatting(template), speculative_config={"method": method})


def said(llm: LLM, prompt: Any, *tokens: int, **options: Any) -> Any:
    """Returns what comes out when the model wants to write these tokens."""
    allowed = SamplingParams(temperature=0, max_tokens=len(tokens), **options)
    (request,) = llm.requests(prompt, allowed)
    request.extend(tokens)
    return request


A, B = tokenizer()("ab").input_ids


@pytest.mark.parametrize("end", [END, OTHER, TURN])
def test_an_answer_ends_where_any_of_the_three_says(end: int) -> None:
    llm = chatter()
    request = said(llm, llm.chat_prompt(CHAT), A, end, B)
    assert (request.output_ids, request.text) == ([A, end], "a")
    assert (request.finish_reason, request.stop_reason) == ("stop", None)
    forced = llm.chat(CHAT, {"allowed_token_ids": [end], "max_tokens": 3})
    assert (forced.token_ids, forced.finish_reason) == ([end], "stop")


@pytest.mark.parametrize("end", [END, TURN])
def test_other_texts_end_as_the_generation_config_says(end: int) -> None:
    llm = chatter()
    for prompt in ("hi", list(llm.chat_ids(CHAT))):
        assert said(llm, prompt, A, end, B).output_ids == [A, end, B]
        assert said(llm, prompt, A, OTHER, B).output_ids == [A, OTHER]


def test_ids_of_a_chat_are_ids_and_know_their_ends() -> None:
    llm = chatter()
    ids = llm.chat_ids(CHAT)
    assert isinstance(ids, ChatIds)
    assert ids.ends == (OTHER, END, TURN)
    assert llm.tokenizer.decode(ids) == "user:hi<|turn|>\nassistant:"
    for given in (ids, [ids]):
        (output,) = llm.generate(given, {"allowed_token_ids": [TURN], "max_tokens": 3})
        assert output.token_ids == [TURN]
    chunks = list(llm.stream(ids, {"allowed_token_ids": [TURN], "max_tokens": 3}))
    assert [chunk.finish_reason for chunk in chunks] == ["stop"]


def test_answers_that_a_drafter_learns_from_end_as_those_of_chats(tmp_path: Path) -> None:
    llm, file = chatter(), tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"text": "hi"}')
    found = prompts([file], llm.tokenizer, "a model", 9)
    outputs = llm.generate(found, {"allowed_token_ids": [TURN], "max_tokens": 3})
    assert [output.token_ids for output in outputs] == [[TURN], [TURN] * 3]


def test_options_about_ends_know_all_of_them() -> None:
    llm = chatter()
    request = said(llm, llm.chat_prompt(CHAT), A, TURN, B, ignore_eos=True)
    assert request.output_ids == [A, TURN, B]
    output = llm.chat(
        CHAT, {"allowed_token_ids": [A, TURN], "min_tokens": 3, "max_tokens": 4, "seed": 1}
    )
    assert output.token_ids[:3] == [A] * 3
    (request,) = llm.requests(
        llm.chat_prompt(CHAT), {"max_tokens": 9, "structured_outputs": {"choice": ["ab"]}}
    )
    mask = request.options.mask
    assert mask is not None
    allowed = mask.allowed([A, B], [[]])[0].nonzero()[:, 0].tolist()
    assert allowed == sorted([END, OTHER, TURN])


def test_the_end_of_a_turn_that_is_not_special_is_no_text_either() -> None:
    llm = chatter(template=TEMPLATE.replace("<|turn|>", "<|shown|>"))
    request = said(llm, llm.chat_prompt(CHAT), A, SHOWN, B)
    assert (request.output_ids, request.text) == ([A, SHOWN], "a")
    request = said(llm, llm.chat_prompt(CHAT), A, SHOWN, B, stop="never said")
    assert request.text == "a"
    request = said(llm, llm.chat_prompt(CHAT), A, SHOWN, skip_special_tokens=False)
    assert request.text == "a<|shown|>"


def test_a_template_of_ones_own_ends_its_own_turns() -> None:
    llm = chatter()
    own = TEMPLATE.replace("<|turn|>", "<|asks|>")
    assert llm.chat_ids(CHAT, chat_template=own).ends == (OTHER, END, ASKS)
    assert llm.chat_ids(CHAT).ends == (OTHER, END, TURN)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
        "{% for m in messages %}{{ m['content'] }}<|absent|>{% endfor %}",
        "{% for m in messages %}{{ m['content'] if m['role'] == 'user' }}{% endfor %}",
        "{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}hi",
    ],
)
def test_a_template_that_names_no_token_adds_none(template: str) -> None:
    assert chatter(template=template).chat_ids(CHAT).ends == (OTHER, END)


def test_a_template_that_takes_parts_only() -> None:
    parts = "{% for p in m['content'] %}{{ p.text }}{% endfor %}"
    llm = chatter(template=TEMPLATE.replace("{{ m['content'] }}", parts))
    assert llm.input_processor.ends.of_chats() == (OTHER, END, TURN)


def test_describe_says_where_each_end_came_from() -> None:
    found = chatter().describe()
    assert [(end.token, end.chats_only, *end.sources) for end in found.ends] == [
        (OTHER, False, "generation_config"),
        (END, True, "the tokenizer's eos_token"),
        (TURN, True, "the chat template"),
    ]
    line = str(found)
    assert "'<other>' (generation_config), '<end>' in chats (the tokenizer's eos_token)" in line
    assert "'<|turn|>' in chats (the chat template)" in line
    (one, *rest) = chatter(eos=None, template=TEMPLATE.replace("<|turn|>", "<end>")).describe().ends
    assert (str(one), rest) == ("'<end>' (the tokenizer's eos_token, the chat template)", [])


def test_a_saved_folder_says_the_same(tmp_path: Path) -> None:
    llm = chatter()
    llm.target.model.save_pretrained(tmp_path)
    llm.tokenizer.save_pretrained(tmp_path)
    assert LLM(tmp_path).describe().ends == llm.describe().ends


# -- stop strings that are special tokens ----------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_a_stop_string_that_is_a_special_token_ends_the_text(streaming: bool) -> None:
    llm = chatter()
    params = SamplingParams(max_tokens=9, stop=["<|turn|>", "zz"])
    (request,) = llm.requests("hi", params, streaming=streaming)
    request.extend([A, B, TURN, A])
    assert (request.output_ids, request.text) == ([A, B, TURN], "ab")
    assert (request.finish_reason, request.stop_reason) == ("stop", "<|turn|>")
    assert request.all_stop_token_ids == (OTHER, TURN)


def test_it_ends_the_text_of_an_engine_with_drafts_too() -> None:
    llm = chatter(method="ngram")
    options = {"allowed_token_ids": [A, TURN], "temperature": 1.0, "seed": 3, "max_tokens": 60}
    (output,) = llm.generate("hi", {**options, "stop": "<|turn|>", "min_tokens": 2})
    assert output.token_ids[-1] == TURN
    assert TURN not in output.token_ids[:-1]
    assert len(output.token_ids) > 2
    assert output.outputs[0].stop_reason == "<|turn|>"
    chunks = list(llm.stream("hi", {**options, "stop": "<|turn|>", "min_tokens": 2}))
    assert "".join(chunk.text for chunk in chunks) == output.text


def test_it_is_part_of_the_text_where_stop_strings_are() -> None:
    llm = chatter()
    included = {"stop": "<|turn|>", "include_stop_str_in_output": True}
    assert said(llm, "hi", A, TURN, B, **included).text == "a<|turn|>"
    assert said(llm, "hi", A, TURN, B, stop="<|turn|>", skip_special_tokens=False).text == "a"


def test_so_it_is_where_the_token_ends_the_text_anyway() -> None:
    llm = chatter()
    for included, text in ((True, "a<|turn|>"), (False, "a")):
        options = {"stop": "<|turn|>", "include_stop_str_in_output": included}
        request = said(llm, llm.chat_prompt(CHAT), A, TURN, B, **options)
        assert (request.text, request.stop_reason) == (text, "<|turn|>")


def test_it_is_cut_off_where_the_token_ends_the_text_and_is_shown() -> None:
    llm = chatter()
    for stop, text in (("<|turn|>", "a"), ("a<|turn|>", "")):
        prompt = llm.chat_prompt(CHAT)
        request = said(llm, prompt, A, TURN, B, stop=stop, skip_special_tokens=False)
        assert (request.text, request.stop_reason) == (text, stop)
    request = said(llm, "hi", A, B, stop="b", stop_token_ids=[B])
    assert (request.text, request.stop_reason) == ("a", "b")


def test_it_is_found_where_it_is_spelt_in_other_tokens() -> None:
    ids = tokenizer()("<|turn|>").input_ids
    request = said(chatter(), "hi", A, *ids, B, stop="<|turn|>")
    assert (request.text, request.stop_reason) == ("a", "<|turn|>")


@pytest.mark.parametrize("stop", ["<|turn|>\n", "a<|turn|>", "<|turn|><|asks|>"])
def test_a_special_token_among_other_text_is_refused(stop: str) -> None:
    llm = chatter()
    with pytest.raises(ParamsError, match=r"'<\|turn\|>' is a special token, which texts leave"):
        llm.generate("hi", {"stop": ["b", stop]})
    written = llm.token_ids(f"b{stop}b")
    request = said(llm, "hi", *written, stop=stop, skip_special_tokens=False)
    assert (request.text, request.stop_reason) == ("b", stop)


def test_a_special_token_that_the_text_holds_is_found_in_the_text() -> None:
    """As the tags of tool calls, where these are special tokens."""
    llm = chatter()
    for stop, text in (("<|turn|>", "a"), ("<|turn|>b", "a"), ("<|asks|>", "a<|turn|>ba")):
        params = SamplingParams(max_tokens=9, stop=stop)
        (request,) = llm.requests("hi", params, shown=["<|turn|>"])
        request.extend([A, TURN, B, A, ASKS, B])
        assert (request.text, request.stop_reason) == (text, stop)


def test_an_added_token_that_is_text_is_found_in_the_text() -> None:
    request = said(chatter(), "hi", A, SHOWN, B, stop="<|shown|>")
    assert (request.text, request.stop_reason) == ("a", "<|shown|>")
