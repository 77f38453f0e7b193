"""JSON schemas as programs make them: what only remarks something, and what nothing can follow."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from datetime import date, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path
from re import Pattern
from typing import Annotated, Any, Literal
from uuid import UUID

import pydantic
import pytest

from outpace.errors import ParamsError
from outpace.forms.grammars import Grammars
from outpace.forms.json_schemas import without_annotations

from .texts import END, SIZE, tokenizer


def written(form: Any, first: str = "", kind: str = "json") -> str:
    """Returns a text of a form that begins so and ends soon."""
    mask = Grammars(tokenizer(), SIZE, [END]).compile(kind, form).copy()
    ids: list[int] = tokenizer()(first).input_ids if first else []
    wanted = [END, *tokenizer()('"}]10').input_ids]
    for _ in range(400):
        allowed = mask.allowed(ids, [[]])[0].nonzero()[:, 0].tolist()
        assert allowed, f"nothing may follow {tokenizer().decode(ids)!r}"
        ids.append(next((token for token in wanted if token in allowed), allowed[-1]))
        if ids[-1] == END:
            return str(tokenizer().decode(ids[:-1]))
    raise AssertionError("the text does not end")


class Kind(Enum):
    SMALL = "small"


class Inner(pydantic.BaseModel):
    home: Path
    kind: Literal["inner"]


class Other(pydantic.BaseModel):
    kind: Literal["other"]


Either = Annotated[Inner | Other, pydantic.Field(discriminator="kind")]
LOOSE: list[Any] = [
    Path, pydantic.FilePath, pydantic.DirectoryPath, pydantic.NewPath, bytes, pydantic.SecretStr,
    pydantic.SecretBytes, pydantic.Base64Bytes, pydantic.Base64Str, IPv4Network, IPv4Interface,
    pydantic.IPvAnyAddress, Pattern, pydantic.UUID4, list[Path], dict[Path, int], Path | None,
    tuple[Path, bytes], Either,
]  # fmt: skip
"""Types with formats that llguidance does not know."""
STRICT: list[Any] = [
    UUID, date, timedelta, Decimal, pydantic.AnyUrl, IPv4Address, Kind, dict[str, int], Hashable,
    pydantic.AwareDatetime, pydantic.Json[list[int]], tuple[int, str], pydantic.ByteSize,
]  # fmt: skip


@pytest.mark.parametrize("type_", [*LOOSE, *STRICT], ids=str)
def test_what_pydantic_makes_of_types_is_followed(type_: Any) -> None:
    model = pydantic.create_model("Model", field=(type_, ...))
    Grammars(tokenizer(), SIZE, [END]).compile("json", model.model_json_schema())


@pytest.mark.parametrize("type_", [bytes, pydantic.SecretStr, Inner, pydantic.Base64Bytes], ids=str)
def test_pydantic_takes_back_what_its_schema_allows(type_: Any) -> None:
    model = pydantic.create_model("Model", field=(type_, ...))
    model.model_validate_json(written(model.model_json_schema()))


@pytest.mark.parametrize("type_", [UUID, date, IPv4Address], ids=str)
def test_formats_that_are_known_are_still_followed(type_: Any) -> None:
    adapted = pydantic.TypeAdapter(type_)
    adapted.validate_json(written(adapted.json_schema()))


@pytest.mark.parametrize("type_", [set[int], frozenset[str], dict[UUID, int]], ids=str)
def test_what_pydantic_makes_and_no_grammar_follows_is_to_be_left_out(type_: Any) -> None:
    model = pydantic.create_model("Model", field=(type_, ...))
    with pytest.raises(ParamsError, match=r"json holds what no grammar follows .*: leave it out\."):
        written(model.model_json_schema())


@pytest.mark.parametrize(
    "format", ["path", "uri-reference", "iri", "regex", "json-pointer", "int32", "float", "x y"]
)
def test_an_unknown_format_demands_nothing(format: str) -> None:
    schema = {"type": "string", "format": format, "maxLength": 2}
    assert written(schema, '"a') == '"a"'
    assert written({"allOf": [{"format": format}, {"const": "b"}]}) == '"b"'
    number = {"type": "integer", "minimum": 5, "maximum": 5, "format": format}
    assert written(number) == "5"
    lark = f"start: /a/ %json {json.dumps(schema)} /b/ %json {json.dumps(number)} /c/"
    assert written(lark, kind="grammar") == 'a""b5c'


@pytest.mark.parametrize(
    "schema",
    [
        {"const": {"format": "path", "uniqueItems": False}},
        {"enum": [{"format": "path"}]},
        {"properties": {"a": {"default": {"format": "path"}, "examples": [{"format": "path"}]}}},
        {"properties": {"format": {"const": "path"}, "uniqueItems": False}, "required": ["format"]},
        {"type": "string", "format": "uuid"},
        {"uniqueItems": True, "propertyNames": {"maxLength": 3}},
        {"format": 5},
        True,
    ],
)
def test_what_is_no_remark_stays(schema: Any) -> None:
    assert without_annotations(json.dumps(schema)) == json.dumps(schema)


@pytest.mark.parametrize("pattern", [r'^[^"]+$', r'^[^"\\]+$', r"^[^\\]+$", r"^[^\x20-\x7e]+$"])
@pytest.mark.parametrize("value", ['a"b', "a\\b", "ab", "\u00e9", "\t"])
def test_a_negated_class_holds_for_what_json_spells_otherwise(pattern: str, value: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    mask = Grammars(tokenizer(), SIZE, [END]).compile("json", schema).copy()
    ids: list[int] = [*tokenizer()(json.dumps(value, ensure_ascii=False)).input_ids, END]
    fits = all(mask.allowed(ids[:at], [[]])[0, ids[at]] for at in range(len(ids)))
    assert fits == (re.search(pattern, value) is not None)


def test_remarks_are_left_out_wherever_there_are_schemas() -> None:
    remark = {"title": "A", "format": "path"}
    by_name = {"format": remark, "const": remark, "enum": remark, "default": remark}
    schema = {
        **remark,
        "properties": by_name,
        "$defs": by_name,
        "items": [remark, {"not": remark}],
        "anyOf": [{"additionalProperties": remark}],
    }
    assert json.loads(without_annotations(json.dumps(schema))) == json.loads(
        json.dumps(schema).replace(', "format": "path"', "")
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}},  # as zod writes a record
        {"type": "object", "propertyNames": {"format": "path"}, "unevaluatedProperties": True},
    ],
)
def test_keywords_with_which_nothing_is_demanded_are_no_hindrance(schema: Any) -> None:
    assert type(json.loads(written(schema))) is {"array": list, "object": dict}[schema["type"]]


@pytest.mark.parametrize(
    ("kind", "form", "words"),
    [
        ("json", {"not": {"type": "string"}}, "not"),
        ("json", {"properties": {"a": {"uniqueItems": True}}}, "uniqueItems"),
        ("json", {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ("json", {"propertyNames": {"pattern": "a"}}, "propertyNames"),
        ("json", {"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ("json", {"type": "string", "pattern": r"(a)\1"}, "backreferences"),
        ("json", {"$ref": "https://example.org/a"}, "example.org"),
        ("regex", "(?=a)b", "look-around"),
        ("grammar", 'start: %json {"not": {}}', "not"),
    ],
)
def test_what_is_sound_and_cannot_be_followed_is_to_be_left_out(
    kind: str, form: Any, words: str
) -> None:
    with pytest.raises(ParamsError) as found:
        Grammars(tokenizer(), SIZE, [END]).compile(kind, form)
    assert str(found.value).startswith(f"{kind} holds what no grammar follows (")
    remedy = "leave it out, or write anyOf." if words == "oneOf" else "leave it out."
    assert str(found.value).endswith(f"): {remedy}")
    assert words in str(found.value)


@pytest.mark.parametrize("schema", [{"type": "odd"}, {"format": 5}, {"pattern": "("}])
def test_what_is_malformed_is_to_be_corrected(schema: Any) -> None:
    with pytest.raises(ParamsError, match=r"json cannot be made a grammar \(.*\): correct it\."):
        Grammars(tokenizer(), SIZE, [END]).compile("json", schema)


def test_a_number_that_no_json_has_is_told_as_such() -> None:
    with pytest.raises(ParamsError, match="json must be a JSON schema, and is no JSON"):
        Grammars(tokenizer(), SIZE, [END]).compile("json", {"maximum": float("inf")})
