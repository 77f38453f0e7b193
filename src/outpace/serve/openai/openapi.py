"""The description of the API that programs read, at ``/openapi.json``."""

from __future__ import annotations

from typing import Any

from outpace import __version__
from outpace.serve.openai import answer_schemas as answers
from outpace.serve.openai import schemas

_JSON = "application/json"
_EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}
_POSTS = {
    "/v1/completions": ("Continue a text.", schemas.COMPLETION, answers.COMPLETION),
    "/v1/chat/completions": ("Answer a conversation.", schemas.CHAT, answers.CHAT),
    "/tokenize": (
        "Return the token ids of a text or a conversation.",
        schemas.TOKENIZE,
        answers.TOKENIZE,
    ),
    "/detokenize": ("Return the text of token ids.", schemas.DETOKENIZE, answers.DETOKENIZE),
}
_GETS = {
    "/v1/models": ("List the model that is served.", {_JSON: {"schema": answers.MODELS}}),
    "/health": ("Say whether the server lives.", {_JSON: {"schema": answers.HEALTH}}),
    "/ready": ("Say whether it takes requests.", {_JSON: {"schema": answers.READY}}),
    "/metrics": (
        "Tell counters and histograms to Prometheus.",
        {"text/plain": {"schema": {"type": "string"}}},
    ),
}
_STATUSES = {
    "400": "The body cannot be honoured; `param` names the field.",
    "401": "No API key, or a wrong one.",
    "404": "There is no such model.",
    "413": "The body is too large.",
    "415": "The body is not sent as JSON.",
    "429": "Too many texts wait; come again.",
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
    paths |= {path: {"get": _get(words, content)} for path, (words, content) in _GETS.items()}
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


def _get(words: str, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "summary": words,
        "responses": {
            "200": _good(content),
            **_failures({status: _STATUSES[status] for status in ("401", "503")}),
        },
    }


def _good(content: dict[str, Any]) -> dict[str, Any]:
    return {"description": "The answer.", "content": content}


def _failures(statuses: dict[str, str]) -> dict[str, Any]:
    content = {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        status: {"description": words, "content": content} for status, words in statuses.items()
    }
