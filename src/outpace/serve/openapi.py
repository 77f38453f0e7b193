"""The description of the API that programs read, at ``/openapi.json``."""

from __future__ import annotations

from typing import Any

from outpace import __version__
from outpace.serve import schemas

_POSTS = {
    "/v1/completions": ("Continue a text.", schemas.COMPLETION),
    "/v1/chat/completions": ("Answer a conversation.", schemas.CHAT),
    "/tokenize": ("Return the token ids of a text or a conversation.", schemas.TOKENIZE),
    "/detokenize": ("Return the text of token ids.", schemas.DETOKENIZE),
}
_GETS = {
    "/v1/models": "List the model that is served.",
    "/health": "Say whether the server lives.",
    "/ready": "Say whether it takes requests.",
    "/metrics": "Tell counters and histograms to Prometheus.",
}
_STATUSES = {
    "400": "The body cannot be honoured; `param` names the field.",
    "401": "No API key, or a wrong one.",
    "404": "There is no such model.",
    "413": "The body is too large.",
    "415": "The body is not sent as JSON.",
    "429": "Too many texts wait; come again.",
    "503": "The server is shutting down.",
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
        path: {"post": _post(words, schema)} for path, (words, schema) in _POSTS.items()
    }
    paths |= {path: {"get": _get(words)} for path, words in _GETS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "outpace", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(words: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "summary": words,
        "security": [{"key": []}, {}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "The answer."}, **_failures(_STATUSES)},
    }


def _get(words: str) -> dict[str, Any]:
    return {
        "summary": words,
        "responses": {
            "200": {"description": "The answer."},
            **_failures({status: _STATUSES[status] for status in ("401", "503")}),
        },
    }


def _failures(statuses: dict[str, str]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        status: {"description": words, "content": content} for status, words in statuses.items()
    }
