"""Clients of others: LangChain, LlamaIndex, and OpenAI's package for Node.

``make clients`` installs them in a folder of their own; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .conftest import call, running_requests_end

HERE = Path(__file__).parent / "clients"
INSTALLED = Path(os.environ.get("OUTPACE_CLIENTS", HERE.parents[2] / ".clients")).resolve()
CHAT = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Tell me about a cat."},
    ],
    "max_tokens": 16,
    "temperature": 1.0,
    "seed": 7,
}
TEXT = {"prompt": "One day", "max_tokens": 16, "temperature": 1.0, "seed": 7}


def said_by(command: list[str], url: str) -> dict[str, Any]:
    """Returns what a client's script has printed."""
    environment = {**os.environ, "OUTPACE_CLIENTS": str(INSTALLED), "LANGSMITH_TRACING": "false"}
    done = subprocess.run(
        [*command, url], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def by_python(script: str, url: str) -> dict[str, Any]:
    python = INSTALLED / "venv" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python}: run 'make clients'")
    return said_by([str(python), str(HERE / script)], url)


def chat_of(url: str, **more: Any) -> tuple[str, int]:
    """Returns the text and all tokens of the chat that the scripts ask for."""
    answer = call(url, "/v1/chat/completions", {**CHAT, **more})[1]
    return answer["choices"][0]["message"]["content"], answer["usage"]["total_tokens"]


def texts_of(url: str, **more: Any) -> list[str]:
    answer = call(url, "/v1/completions", {**TEXT, **more})[1]
    return [choice["text"] for choice in answer["choices"]]


def test_langchain(url: str) -> None:
    found, (chat, tokens) = by_python("langchain_calls.py", url), chat_of(url)
    (text,) = texts_of(url, stop=["."])
    assert found["chat"] == found["streamed"] == chat
    assert found["usage"] == found["streamed_usage"] == tokens
    assert found["finish_reason"] in ("stop", "length")
    assert found["batch"] == [chat, chat]
    assert found["pieces"] > 2
    assert set(found["logprobs"]) == {2}
    assert found["shaped"]["colour"] in ("red", "blue")
    assert found["text"] == found["text_streamed"] == text


def test_llamaindex(url: str) -> None:
    found, (chat, tokens) = by_python("llamaindex_calls.py", url), chat_of(url)
    assert found["chat"] == found["streamed"] == found["async"] == chat
    assert found["usage"] == tokens
    assert [found["text"]] == [found["text_streamed"]] == texts_of(url)


def test_node(url: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node on this machine")
    if not (INSTALLED / "node_modules" / "openai").is_dir():
        pytest.skip(f"there is no openai package in {INSTALLED}/node_modules: run 'make clients'")
    found, (chat, tokens) = said_by([node, str(HERE / "openai_calls.mjs")], url), chat_of(url)
    assert found["chat"] == found["streamed"] == found["helper"] == chat
    assert found["usage"] == found["streamed_usage"] == tokens
    assert found["pieces"] > 2
    assert set(found["logprobs"]) == {2}
    assert found["texts"] == texts_of(url, n=2, stop=".")
    assert found["shaped"]["colour"] in ("red", "blue")
    assert found["refused"] == {"kind": "BadRequestError", "status": 400, "param": "top_p"}
    assert found["models"] == ["tiny"]
    running_requests_end(url)
