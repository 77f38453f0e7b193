"""What /openapi.json says is what the server does: schemathesis makes requests from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks
from schemathesis.config import SchemathesisConfig

from outpace import LLM
from outpace.serve.openai import openapi

from .conftest import call, running

LONG = os.environ.get("OUTPACE_FUZZ") == "long"
EXAMPLES = 300 if LONG else 30
TOKENS = 3
"""Longest text: what is asked is of interest here, not what is said."""


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[str]:
    with running(llm, request_seconds=10.0, max_n=4) as found:
        yield found


def configured() -> SchemathesisConfig:
    """A short run draws its requests; a long one also makes one for each value of each field, some
    two thousand."""
    config = SchemathesisConfig()
    config.projects.default.phases.coverage.enabled = LONG
    return config


described = schemathesis.openapi.from_dict(openapi.description(), config=configured())


@described.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_server_does_what_its_description_says(case: Any, address: str) -> None:
    if isinstance(case.body, dict) and "completions" in case.path:
        case.body = {**case.body, "max_tokens": TOKENS}
        case.body.pop("max_completion_tokens", None)
    answer = case.call(base_url=address, timeout=60)
    case.validate_response(
        answer,
        checks=[
            checks.not_a_server_error,
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_schema_conformance,
        ],
    )
    assert call(address, "/ready")[1]["waiting"] == 0
