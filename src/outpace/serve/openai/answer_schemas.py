"""What answers hold, as JSON schemas: published as OpenAPI, and real ones are checked by tests."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
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


COMPLETION = _answer(
    "text_completion", _object(index=COUNT, text=TEXT, logprobs=ANY, finish_reason=REASON)
)
CHAT = _answer(
    "chat.completion", _object(index=COUNT, message=MESSAGE, logprobs=ANY, finish_reason=REASON)
)
TOKENIZE = _object(tokens=_list(COUNT), count=COUNT, max_model_len=COUNT)
DETOKENIZE = _object(prompt=TEXT)
MODELS = _object(
    object={"enum": ["list"]},
    data=_list(_object(id=TEXT, object={"enum": ["model"]}, owned_by=TEXT, max_model_len=COUNT)),
)
HEALTH = _object(status={"enum": ["ok", "loading"]})
READY = _object(status={"enum": ["ready"]}, running=COUNT, waiting=COUNT)
