"""Conversations as they are given: messages in OpenAI's format, one conversation or several; and
the tokens that end texts and answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from outpace.core.strict_json import STRICT
from outpace.core.unicode import check_unicode
from outpace.core.values import shown
from outpace.errors import PromptError, reason_of
from outpace.targets.hf.loading.loaded import TEMPLATE, TOKENIZER, End, LoadedModel

Conversation = Sequence[Mapping[str, Any]]
"""``[{"role": "user", "content": "a text"}, ...]``; a content may also be a list of OpenAI's parts,
``[{"type": "text", "text": "a text"}, {"type": "image_url", "image_url": {"url": ...}}, ...]``."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who a message may be of, as in OpenAI's API. Of others only whom a chat template knows: many take
whoever they do not know for a user."""

NO_VARIABLES = frozenset(
    {
        "conversation",
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
    }
)
"""Arguments of transformers' ``apply_chat_template`` that say what is made of the template's text.
Here that is always the token ids of a prompt which the assistant goes on with."""


def conversations(messages: Conversation | Sequence[Conversation]) -> tuple[list[Any], bool]:
    """Returns the conversations, and whether a list of several was given; ``PromptError`` for what
    is no conversation."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise PromptError(f"{_FORM}, not {shown(messages)}.")
    found = _listed(messages, messages)
    if not found:
        raise PromptError("the chat is empty: give at least one message.")
    if all(isinstance(message, Mapping) for message in found):
        return [found], False
    if any(
        isinstance(chat, (str, bytes, Mapping)) or not isinstance(chat, Iterable) for chat in found
    ):
        raise PromptError(f"{_FORM}, or a list of such lists, not {shown(messages)}.")
    return [_listed(chat, messages) for chat in found], True


def _listed(chat: Any, given: Any) -> list[Any]:
    try:
        return list(chat)
    except TypeError as error:  # a tensor of one number says that it can be iterated over
        raise PromptError(f"{_FORM}, not {shown(given)}.") from error


def messages_of(conversation: Conversation) -> list[Any]:
    """Returns the messages of one conversation; ``PromptError`` for what is none, or several."""
    found, several = conversations(conversation)
    if several:
        raise PromptError(
            "one conversation was expected here, not a list of them: give each by itself."
        )
    messages: list[Any] = found[0]
    return messages


def rendered(tokenizer: Any, name: str, messages: Conversation, /, **for_template: Any) -> str:
    """Returns the text that a chat template makes of one conversation, up to the answer.

    name: the model's, for error messages. for_template: the template's variables, and its text as
    ``chat_template`` where it is not the tokenizer's own. Raises ``PromptError`` where there is no
    template, where it refuses the messages, and for a name of `NO_VARIABLES`.
    """
    return applied(tokenizer, name, [with_text(message) for message in messages], **for_template)


def applied(
    tokenizer: Any, name: str, messages: Sequence[Mapping[str, Any]], /, **for_template: Any
) -> str:
    """Returns what `rendered` does, of messages that are as the template wants them."""
    if not messages:
        raise PromptError("the chat is empty: give at least one message.")
    for given in for_template:
        if given in NO_VARIABLES:
            raise PromptError(
                f"{given!r} is no variable of a chat template, and outpace decides about it: leave "
                "it out."
            )
    if not for_template.get("chat_template"):
        check_template(tokenizer, name)
    template = for_template.get("chat_template") or tokenizer.chat_template
    if "developer" not in str(template):  # most know the role under its older name
        messages = [by_the_system(message) for message in messages]
    variables = {**for_template, "tokenize": False, "add_generation_prompt": True}

    own = [given for given in for_template if given not in ("chat_template", "tools")]

    def text_of(messages: Sequence[Mapping[str, Any]], without: Collection[str] = ()) -> str:
        chosen = {name: value for name, value in variables.items() if name not in without}
        return str(tokenizer.apply_chat_template(list(messages), **chosen))

    try:
        text = text_of(messages)
    except Exception as error:  # a template is a program of the model's, and raises what it likes
        remedy = _remedy(messages, text_of)
        if own:
            with suppress(Exception):  # then the variables are not to blame, or not alone
                text_of(messages, own)
                remedy = f"change {' or '.join(map(repr, own))}, or leave it out"
        raise PromptError(
            f"the chat template of {name} refuses these messages ({reason_of(error)}): {remedy}."
        ) from error
    _check_roles(messages, text, text_of)
    check_unicode("the prompt", text)
    return text


def by_the_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _remedy(
    messages: Sequence[Mapping[str, Any]], text_of: Callable[[Sequence[Mapping[str, Any]]], str]
) -> str:
    """Returns what to do about messages that a template refuses."""
    changed, odd = list(messages), ""
    for index, message in enumerate(messages):
        given = message.get("tool_calls") or ()
        if not isinstance(given, Sequence) or isinstance(given, str):
            return f"give a list as messages[{index}].tool_calls, not {shown(given)}"
        calls, place, value = _with_objects(given)
        if place:
            changed[index] = {**message, "tool_calls": calls}
            odd = odd or f"give an object as messages[{index}].{place}, not {shown(value)}"
    if odd:
        with suppress(Exception):  # then the arguments are not to blame, or not alone
            text_of(changed)
            return odd
    return "check their roles and their order"


def _with_objects(calls: Sequence[Any]) -> tuple[list[Any], str, Any]:
    """Returns calls with an object as the arguments of each, and the first place where there was
    none, and what was there."""
    changed = list(calls)
    place, first = "", None
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and not isinstance(function["arguments"], Mapping):
            changed[number] = {**call, "function": {**function, "arguments": {}}}
            if not place:
                place = f"tool_calls[{number}].function.arguments"
                first = function["arguments"]
    return changed, place, first


def _check_roles(
    messages: Sequence[Mapping[str, Any]],
    text: str,
    text_of: Callable[[Sequence[Mapping[str, Any]]], str],
) -> None:
    """Raises ``PromptError`` for a role that a template does not know, and takes for the user.
    text: what the template makes of the messages, as ``text_of`` says of others."""

    def reads_like_a_user(index: int) -> bool:
        of_user = {**messages[index], "role": "user"}
        try:
            return text_of([*messages[:index], of_user, *messages[index + 1 :]]) == text
        except Exception:  # the template wants no user there, so that it knows the role
            return False

    for index, message in enumerate(messages):
        if message["role"] not in ROLES and reads_like_a_user(index):
            known = " or ".join(map(repr, ROLES))
            given = shown(message["role"])
            raise PromptError(f"messages[{index}].role must be {known}, not {given}.")


def with_text(message: Any) -> dict[str, Any]:
    """Returns a message as chat templates expect it: its content one text, the arguments of its
    calls objects; ``PromptError`` for what is no message. A call of a tool needs no content."""
    read = _read(message)
    content = read.get("content")
    if content is None and "tool_calls" in read:
        return read
    return {**read, "content": _text(content)}


def illustrated(
    messages: Conversation, place: str | None = None
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns the messages as the template of a vision-language model wants them, and their images
    in order, as they were given.

    place: what stands for an image in a text, for a template whose contents are texts; None for one
    that reads lists of parts.
    """
    read, images = [], []
    for given in messages:
        message = _read(given)
        content = message.get("content")
        if content is None and "tool_calls" in message:
            read.append(message)
            continue
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, (list, tuple)):
            raise PromptError(_no_content(content))
        shown = [(part, _image(part)) for part in parts]
        images += [image for _, image in shown if image is not None]
        if place is None:
            own: Any = [
                {"type": "text", "text": _part(part)} if image is None else {"type": "image"}
                for part, image in shown
            ]
        else:
            own = "\n".join(_part(part) if image is None else place for part, image in shown)
        read.append({**message, "content": own})
    return read, images


def check_template(
    tokenizer: Any, name: str, remedy: str = "use generate() instead", processor: Any = None
) -> None:
    """Raises ``PromptError`` where neither the tokenizer nor the processor has a chat template.
    name: the model's. remedy: what the error's sentence asks for."""
    if not any(getattr(owner, "chat_template", None) for owner in (processor, tokenizer)):
        raise PromptError(f"the tokenizer of {name} has no chat template: {remedy}.")


def end_of_turn(tokenizer: Any, template: Any) -> tuple[int, str] | None:
    """Returns the special token that a chat template writes after an answer, and its text; None
    where it writes none. template: a text, or whatever else the tokenizer's own one is."""
    rest = _after_an_answer(tokenizer, template).lstrip()
    known = [entry for entry in added_texts(tokenizer).items() if rest.startswith(entry[1])]
    return max(known, key=lambda entry: len(entry[1]), default=None)


def added_texts(tokenizer: Any) -> dict[int, str]:
    """Returns the tokens that a text holds as they are written, special ones among them."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token: entry.content for token, entry in added.items() if entry.content}


def _after_an_answer(tokenizer: Any, template: Any) -> str:
    """What a template writes after the answer at the end of a chat; "" where it takes none."""
    asked = {"chat_template": template} if isinstance(template, str) else {}
    for in_parts in (False, True):  # some vision-language models take lists of parts only
        turns = [_turn("user", QUESTION, in_parts), _turn("assistant", ANSWER, in_parts)]
        try:
            text = str(
                tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=False, **asked
                )
            )
        except Exception:  # a template is a program of the model's, and raises what it likes
            continue
        if ANSWER in text:
            return text.rpartition(ANSWER)[2]
    return ""


def _turn(role: str, text: str, in_parts: bool) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}


QUESTION, ANSWER = "a question", "a text to look for"
"""What a template is tried with."""

_FORM = 'a chat is a list of messages such as {"role": "user", "content": "a text"}'


def _read(message: Any) -> dict[str, Any]:
    """Returns a message without what is None in it, and with the arguments of its calls as a chat
    template reads them. One that was cut in its reasoning has an empty content, and one that
    refuses to answer says so in its content."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(f"{_FORM}, not {shown(message)}.")
    read = {name: value for name, value in message.items() if value is not None}
    calls = read.get("tool_calls")
    if isinstance(calls, (list, tuple)):
        read["tool_calls"] = [_call(call) for call in calls]
    if isinstance(read.get("refusal"), str):  # all that the model said, in OpenAI's API
        read.setdefault("content", read["refusal"])
    if "reasoning" in read:  # its name in vLLM's answers and OpenRouter's
        read.setdefault("reasoning_content", read["reasoning"])
    return {"content": "", **read} if "reasoning_content" in read else read


def _call(call: Any) -> Any:
    """Returns a call with its arguments as values: OpenAI's API has them as a JSON text. None at
    all are an empty object, and so is null. What is written otherwise is left to the template, a
    text that is no JSON too, which a model may have written."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = STRICT.decode(arguments) if arguments.strip() else None
    arguments = {} if arguments is None else arguments
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _text(content: Any) -> str:
    """Returns the text of a content; parts are joined by line breaks, as vLLM does."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise PromptError(_no_content(content))
    return "\n".join(_part(part) for part in content)


def _no_content(content: object) -> str:
    return f"a message's content is a text or a list of parts, not {shown(content)}."


def _image(part: Any) -> Any:
    """Returns the image of a part, as it was given; None for a part that is no image."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_url":
        link = part.get("image_url")
        found = link.get("url") if isinstance(link, Mapping) else link
    elif kind == "image":
        names = ("image", "url", "path")
        found = next((part[name] for name in names if part.get(name) is not None), None)
    else:
        return None
    if found is None:
        raise PromptError(
            'a part with an image is {"type": "image", "image": ...} or {"type": "image_url", '
            f'"image_url": {{"url": ...}}}}, not {shown(part)}.'
        )
    return found


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        raise PromptError(
            f'a part of a message is {{"type": "text", "text": "a text"}}, not {shown(part)}.'
        )
    if kind not in ("text", "refusal"):
        raise PromptError(
            f"a message holds a part of type {shown(kind)}, and outpace reads parts of type 'text' "
            "only: leave it out."
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise PromptError(f"a part of type {kind!r} needs a text, not {shown(text)}.")
    return text


# -- the tokens that end texts and answers ---------------------------------------------------------

KEPT = 16
"""Chat templates of which it is remembered how they end a turn."""


class EndTokens:
    """Texts end as the model's generation_config says, as in transformers' ``generate``.

    That may be too few for chats: some models were taught to end a turn with a token that only
    their tokenizer or their chat template knows of. So an answer ends with any of the three.
    Templates are rendered with the tokenizer: whoever shares it holds its lock.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._turns: dict[str, int | None] = {}  # by template

    @property
    def of_texts(self) -> tuple[int, ...]:
        """The tokens that end any text."""
        return self._loaded.eos_ids

    def of_chats(self, template: str | None = None) -> tuple[int, ...]:
        """Returns the tokens that end an answer. template: the chat's, if it is not the model's."""
        return tuple(self._named(template))

    def described(self) -> tuple[End, ...]:
        """Returns all of them, with who names them; where there is no chat template, and so no
        chat, those that end any text."""
        texts, chats = self.of_texts, self.template(None) is not None
        return tuple(
            End(token, self._text(token), tuple(sources), token not in texts)
            for token, sources in self._named(None).items()
            if chats or token in texts
        )

    def _text(self, token: int) -> str:
        tokenizer = self._loaded.tokenizer
        known = added_texts(tokenizer).get(token)
        if known is None and hasattr(tokenizer, "convert_ids_to_tokens"):
            known = tokenizer.convert_ids_to_tokens(token)
        return str(token if known is None else known)

    def _named(self, template: str | None) -> dict[int, list[str]]:
        """Who names each token that ends an answer; those that end any text come first."""
        loaded, tokenizer = self._loaded, self._loaded.tokenizer
        found = {token: list(loaded.sources_of(token)) for token in self.of_texts}
        end = getattr(tokenizer, "eos_token_id", None)
        for token, source in ((end, TOKENIZER), (self._end_of_turn(template), TEMPLATE)):
            if token is not None and token < loaded.vocabulary:
                found.setdefault(token, []).append(source)
        return {token: list(dict.fromkeys(sources)) for token, sources in found.items()}

    def _end_of_turn(self, template: str | None) -> int | None:
        """The token that a chat template writes after an answer; None where it writes none."""
        used = self.template(template)
        if used is None:
            return None
        key = str(used)
        if key not in self._turns:
            if len(self._turns) >= KEPT:
                self._turns.clear()
            found = end_of_turn(self._loaded.tokenizer, used)
            self._turns[key] = None if found is None else found[0]
        return self._turns[key]

    def template(self, asked: str | None = None) -> Any:
        """Returns the template of a chat, the processor's before the tokenizer's: a text or, where
        there are several, a dict of them; None where there is none. asked: what comes before both.
        """
        owners = (self._loaded.processor, self._loaded.tokenizer)
        own = [getattr(owner, "chat_template", None) for owner in owners]
        return next((template for template in (asked, *own) if template), None)
