"""JSON schemas of response bodies, and the OpenAPI description of the whole API, served at
``/openapi.json``. Tests check real answers by it."""

from __future__ import annotations

import re
from typing import Any

from outpace import __version__
from outpace.serve.openai import schemas
from outpace.serve.openai.schemas import COUNT, TEXT, Schema

# -- answers ---------------------------------------------------------------------------------------

ANY: Schema = {}


def _object(**properties: Schema) -> Schema:
    """Returns the schema of an object that has these fields, and maybe others."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


USAGE = _object(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=_object(cached_tokens=COUNT),
    completion_tokens_details=_object(
        accepted_prediction_tokens=COUNT, rejected_prediction_tokens=COUNT
    ),
)

TOOL_CALL = _object(
    id=TEXT, type={"enum": ["function"]}, function=_object(name=TEXT, arguments=TEXT)
)

MESSAGE = _object(role={"enum": ["assistant"]}, content=_or_null(TEXT), refusal={"type": "null"})
MESSAGE["properties"]["tool_calls"] = _list(TOOL_CALL)

REASON: Schema = {"enum": ["stop", "length", "tool_calls"]}


def _answer(kind: str, choice: Schema) -> Schema:
    return _object(
        id=TEXT,
        object={"enum": [kind]},
        created=COUNT,
        model=TEXT,
        choices=_list(choice),
        usage=USAGE,
        outpace=_object(metrics=_list({"type": "object"})),
    )


COMPLETION_ANSWER = _answer(
    "text_completion", _object(index=COUNT, text=TEXT, logprobs=ANY, finish_reason=REASON)
)
CHAT_ANSWER = _answer(
    "chat.completion", _object(index=COUNT, message=MESSAGE, logprobs=ANY, finish_reason=REASON)
)
TOKENIZE_ANSWER = _object(tokens=_list(COUNT), count=COUNT, max_model_len=COUNT)
DETOKENIZE_ANSWER = _object(prompt=TEXT)
MODEL = _object(id=TEXT, object={"enum": ["model"]}, owned_by=TEXT, max_model_len=COUNT)
MODELS = _object(object={"enum": ["list"]}, data=_list(MODEL))
HEALTH = _object(status={"enum": ["ok", "loading"]})
READY = _object(status={"enum": ["ready"]}, running=COUNT, waiting=COUNT)


# -- the document ----------------------------------------------------------------------------------

_JSON = "application/json"
_EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}
_POSTS = {
    "/v1/completions": ("Continue a text.", schemas.COMPLETION, COMPLETION_ANSWER),
    "/v1/chat/completions": ("Answer a conversation.", schemas.CHAT, CHAT_ANSWER),
    "/tokenize": (
        "Return the token ids of a text or a conversation.",
        schemas.TOKENIZE,
        TOKENIZE_ANSWER,
    ),
    "/detokenize": ("Return the text of token ids.", schemas.DETOKENIZE, DETOKENIZE_ANSWER),
}
_GETS = {
    "/v1/models": ("List the model that is served.", {_JSON: {"schema": MODELS}}),
    "/v1/models/{name}": ("Describe the model that is served.", {_JSON: {"schema": MODEL}}),
    "/health": ("Say whether the server lives.", {_JSON: {"schema": HEALTH}}),
    "/ready": ("Say whether it takes requests.", {_JSON: {"schema": READY}}),
    "/metrics": (
        "Return counters and histograms for Prometheus.",
        {"text/plain": {"schema": {"type": "string"}}},
    ),
}
_STATUSES = {
    "400": "The body cannot be honoured; `param` names the field.",
    "401": "No API key, or a wrong one.",
    "404": "There is no such model.",
    "408": "The body has not come in time.",
    "413": "The body is too large.",
    "415": "The body is not sent as JSON.",
    "429": "Too many texts wait; come again.",
    "500": "The server failed on this request; its log says why.",
    "503": "The server still loads its model, or is shutting down.",
    "504": "The request took too long.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def description() -> dict[str, Any]:
    """Returns the OpenAPI document."""
    paths: dict[str, Any] = {
        path: {"post": _post(words, asked, answered)}
        for path, (words, asked, answered) in _POSTS.items()
    }
    paths |= {
        path: {"get": _get(words, content, re.findall(r"{(\w+)}", path))}
        for path, (words, content) in _GETS.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "outpace", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(words: str, asked: dict[str, Any], answered: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": answered}}
    if "stream" in asked["properties"]:
        content |= _EVENTS
    return {
        "summary": words,
        "security": [{"key": []}, {}],
        "requestBody": {"required": True, "content": {_JSON: {"schema": asked}}},
        "responses": {"200": _good(content), **_failures(_STATUSES)},
    }


def _get(words: str, content: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """names: those in the path, which may name what there is not."""
    statuses = ("401", "404", "503") if names else ("401", "503")
    found: dict[str, Any] = {
        "summary": words,
        "responses": {
            "200": _good(content),
            **_failures({status: _STATUSES[status] for status in statuses}),
        },
    }
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": TEXT} for name in names
        ]
    return found


def _good(content: dict[str, Any]) -> dict[str, Any]:
    return {"description": "The answer.", "content": content}


def _failures(statuses: dict[str, str]) -> dict[str, Any]:
    content = {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        status: {"description": words, "content": content} for status, words in statuses.items()
    }
