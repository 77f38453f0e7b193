"""Whatever a body holds: an answer or a sentence, never a failure of the server, never silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import LLM
from outpace.serve.openai import schemas

from .conftest import call, running

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["auto", "off", "a", "<|end|>", "json_object", "user", "\ud800", ""]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def of(schema: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Returns values that the schema allows, and now and then any other."""
    if "anyOf" in schema:
        return st.one_of([of(one, depth) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        known = {name: of(one, depth + 1) for name, one in schema.get("properties", {}).items()}
        required = {name: known.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional=known if depth < 3 else {})
    if kind == "array":
        return st.lists(
            of(schema["items"], depth + 1), min_size=schema.get("minItems", 0), max_size=3
        )
    low, high = schema.get("minimum"), schema.get("maximum")
    return {
        "integer": st.integers(0 if low is None else low, 12 if high is None else high),
        "number": st.floats(low or 0, high or 2),
        "boolean": st.booleans(),
        "string": st.text(min_size=schema.get("minLength", 0), max_size=8),
    }[kind]


def mostly(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Returns bodies of which few fields are strange."""
    fields = {name: of(one, 1) | ANYTHING for name, one in schema["properties"].items()}
    for name in ("model", "stream", "max_tokens", "max_completion_tokens", "ignore_eos"):
        fields.pop(name, None)
    required = {name: of(schema["properties"][name], 1) for name in schema["required"]}
    bodies = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({**required, **{name: fields[name] for name in names}})
    )
    return bodies | st.dictionaries(st.text(max_size=6), ANYTHING, max_size=3) | ANYTHING


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[str]:
    with running(llm, request_seconds=3.0, max_n=4) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        ("/v1/completions", schemas.COMPLETION),
        ("/v1/chat/completions", schemas.CHAT),
        ("/tokenize", schemas.TOKENIZE),
        ("/detokenize", schemas.DETOKENIZE),
    ],
)
@settings(max_examples=120)
@given(data=st.data())
def test_never_a_failure_and_never_silence(
    address: str, path: str, schema: dict[str, Any], data: st.DataObject
) -> None:
    body = data.draw(mostly(schema))
    if isinstance(body, dict) and "completions" in path:
        body.setdefault("max_tokens", 3)
    status, answer, _ = call(address, path, body if body is not None else {})
    assert status in (200, 400, 404, 504), (body, answer)
    if status != 200:
        assert answer["error"]["message"].endswith("."), answer
    assert call(address, "/ready")[1]["waiting"] == 0
