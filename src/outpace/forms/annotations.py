"""What stands in a JSON schema and demands nothing of a text, although llguidance refuses it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

_IDLE: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
}
"""Keywords that llguidance does not follow, and values with which there is nothing to follow."""

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values hold schemas by names, which are no keywords."""

_VALUES = ("const", "enum", "default", "examples", "example")
"""Keywords whose values are JSON of any kind."""


def demands(text: str) -> str:
    """Returns a JSON schema without what it only remarks: formats that llguidance does not know,
    which JSON Schema calls annotations, and keywords with which nothing is demanded."""
    if not any(f'"{name}"' in text for name in ("format", *_IDLE)):
        return text
    schema = json.loads(text)
    for part in _parts(schema):
        name = part.get("format")
        if isinstance(name, str) and not _is_known(name):
            del part["format"]
    for part in _parts(schema):
        for name, values in _IDLE.items():
            if name in part and part[name] in values:
                del part[name]
    return json.dumps(schema)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields each schema in a schema."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            for name, value in part.items():
                if name in _BY_NAME and isinstance(value, dict):
                    waiting += value.values()
                elif name not in _VALUES:
                    waiting.append(value)
            yield part


@lru_cache(maxsize=256)
def _is_known(format: str) -> bool:
    """Whether llguidance follows a format."""
    from llguidance import LLMatcher

    schema = json.dumps({"type": "string", "format": format})
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
