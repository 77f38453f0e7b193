"""JSON schemas of request bodies: checked here, published as OpenAPI."""

from __future__ import annotations

from typing import Any

from outpace.core.options import options_of
from outpace.core.params import SamplingParams
from outpace.inputs.chats import ROLES

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TOKEN: Schema = {**COUNT, "title": "a token id"}
TOKENS: Schema = {"type": "array", "items": TOKEN}
OBJECT: Schema = {"type": "object"}

# What is looked at for every token is bounded, so that one request cannot hold up all others.
STOP: Schema = {**NAME, "maxLength": 512}
BAD_WORD: Schema = {**NAME, "maxLength": 128}
MOST_TOKENS = 1 << 18
"""Tokens of the largest vocabularies: no list of different tokens is longer."""


def _object(properties: dict[str, Schema], required: list[str] | None = None) -> Schema:
    """Returns the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required or [],
        "additionalProperties": False,
    }


def _list(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def _not_offered(schema: Schema) -> Schema:
    """Returns the schema of what OpenAI's API offers and this server does not: clients may only say
    so that they do not want it."""
    return {**schema, "description": NOT_OFFERED}


NOT_OFFERED = "Not offered."
"""How fields are described in which nothing can be asked for."""


NOT_OVER_HTTP = ("bad_words_ids", "logits_processors", "logprobs", "tag")
"""Options of `SamplingParams` that requests do not have, or under their API's own rules."""

PREDICTION: Schema = _object(
    {
        "type": {"type": "string", "enum": ["content"]},
        "content": {
            "anyOf": [
                TEXT,
                _list(
                    _object(
                        {"type": {"type": "string", "enum": ["text"]}, "text": TEXT},
                        ["type", "text"],
                    )
                ),
            ]
        },
    },
    ["type", "content"],
)
"""OpenAI's form of `SamplingParams.prediction`."""

FORMS: dict[str, Schema] = {
    "json": {"anyOf": [OBJECT, NAME]},
    "json_object": FLAG,
    "regex": NAME,
    "choice": _list(NAME, minItems=1),
    "grammar": NAME,
}

LIMITS: dict[str, Schema] = {
    "prediction": PREDICTION,
    "structured_outputs": _object(FORMS),
    "logit_bias": {"maxProperties": 1024},
    "allowed_token_ids": {"maxItems": MOST_TOKENS},
    "bad_words": _list(BAD_WORD, maxItems=256),
    "stop": {"anyOf": [STOP, _list(STOP, maxItems=64)]},
    "stop_token_ids": {"maxItems": 256},
}
"""What bounds the time and memory of a request, beyond what the options themselves demand, and
their form in OpenAI's API where it is another one."""

SAMPLING: dict[str, Schema] = {
    one.name: {**one.schema, "description": one.help, **LIMITS.get(one.name, {})}
    for one in options_of(SamplingParams)
    if one.name not in NOT_OVER_HTTP
}
"""Fields that are options of `SamplingParams` under the same name."""

FORMAT: Schema = _object(
    {
        "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
        "json_schema": _object(
            {"name": TEXT, "description": TEXT, "schema": OBJECT, "strict": FLAG}, ["schema"]
        ),
    },
    ["type"],
)

SHARED: dict[str, Schema] = {
    **SAMPLING,
    "model": TEXT,
    "stream": FLAG,
    "stream_options": _object({"include_usage": FLAG, "include_obfuscation": FLAG}),
    "user": {**TEXT, "maxLength": 1024},
    "response_format": FORMAT,
    **{f"guided_{name}": FORMS[name] for name in ("json", "regex", "choice", "grammar")},
    "priority": {"type": "integer"},
    "outpace": _object({"trace": FLAG, "counts": FLAG}),
}

COMPLETION: Schema = _object(
    {
        **SHARED,
        "prompt": {
            "anyOf": [
                TEXT,
                {"type": "array", "minItems": 1, "items": TOKEN},
                {"type": "array", "minItems": 1, "items": TEXT},
                {"type": "array", "minItems": 1, "items": {**TOKENS, "minItems": 1}},
            ]
        },
        "logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        "best_of": {"type": "integer", "minimum": 1},
        "echo": _not_offered({"type": "boolean", "enum": [False]}),
        "suffix": _not_offered({"type": "string", "enum": [""]}),
    },
    ["prompt"],
)

ARGUMENTS: Schema = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["object"]}},
}
"""The schema of a function's arguments, which are an object whatever the function is."""

TOOL: Schema = _object(
    {
        "type": {"type": "string", "enum": ["function"]},
        "function": _object(
            {"name": NAME, "description": TEXT, "parameters": ARGUMENTS, "strict": FLAG}, ["name"]
        ),
    },
    ["type", "function"],
)

TOOL_CALL: Schema = _object(
    {
        "id": TEXT,
        "index": COUNT,
        "type": {"type": "string", "enum": ["function"]},
        "function": _object({"name": NAME, "arguments": {"anyOf": [TEXT, OBJECT]}}, ["name"]),
    },
    ["function"],
)

IMAGE_URL: Schema = _object(
    {"url": TEXT, "detail": {"type": "string", "enum": ["auto", "low", "high"]}}, ["url"]
)

PART: Schema = _object(
    {
        "type": {"type": "string", "enum": ["text", "image_url", "refusal"]},
        "text": TEXT,
        "refusal": TEXT,
        "image_url": IMAGE_URL,
    },
    ["type"],
)

MESSAGE: Schema = _object(
    {
        "role": {
            "type": "string",
            "enum": list(ROLES),
        },
        "content": {"anyOf": [TEXT, _list(PART)]},
        "name": TEXT,
        "refusal": TEXT,
        "annotations": _not_offered({"type": "array", "enum": [[]]}),
        "reasoning_content": TEXT,
        "reasoning": TEXT,
        "tool_calls": _list(TOOL_CALL),
        "tool_call_id": TEXT,
    },
    ["role"],
)

CHAT: Schema = _object(
    {
        **SHARED,
        "messages": _list(MESSAGE, minItems=1),
        "max_completion_tokens": {"type": "integer", "minimum": 1},
        "logprobs": FLAG,
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        "tools": _list(TOOL),
        "tool_choice": {
            "anyOf": [
                {"type": "string", "enum": ["none", "auto", "required"]},
                _object(
                    {
                        "type": {"type": "string", "enum": ["function"]},
                        "function": _object({"name": NAME}, ["name"]),
                    },
                    ["type", "function"],
                ),
            ]
        },
        "parallel_tool_calls": FLAG,
        "metadata": OBJECT,
        "modalities": _list({"type": "string", "enum": ["text"]}),
        "prompt_cache_key": TEXT,
        "safety_identifier": TEXT,
        "store": _not_offered({"type": "boolean", "enum": [False]}),
        "service_tier": {"type": "string", "enum": ["auto", "default"]},
        "chat_template_kwargs": OBJECT,
    },
    ["messages"],
)

TOKENIZE: Schema = _object(
    {
        "model": TEXT,
        "prompt": TEXT,
        "messages": _list(MESSAGE, minItems=1),
        "add_special_tokens": FLAG,
    }
)

DETOKENIZE: Schema = _object(
    {"model": TEXT, "tokens": {**TOKENS, "maxItems": 4 * MOST_TOKENS}}, ["tokens"]
)
