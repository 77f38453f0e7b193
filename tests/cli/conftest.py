"""A tiny random pair and its tokenizer, saved as a user would have them, and a way to run verbs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from outpace.cli.main import app

SPECIAL = ["<unk>", "</s>"]
WORDS = [f"w{number}" for number in range(94)]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"

Run = Callable[..., Any]


def tokenizer_of(words: list[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per word."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", chat_template=TEMPLATE
    )


def save_model(folder: Path, words: list[str], seed: int) -> Path:
    """Writes a random model of two thin layers, with a tokenizer."""
    config = LlamaConfig(
        vocab_size=len(words) + len(SPECIAL),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer_of(words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "target", WORDS, seed=0)


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "drafter", WORDS, seed=1)


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter with the same words under other ids."""
    return save_model(tmp_path_factory.mktemp("models") / "stranger", WORDS[::-1], seed=1)


@pytest.fixture
def copy_of_target(target: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(target, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def run() -> Run:
    """Runs ``outpace`` in this process: ``run("generate", ..., stdin=b"...")``."""

    def invoke(*arguments: Any, stdin: bytes | None = None) -> Any:
        return CliRunner().invoke(app, [str(word) for word in arguments], input=stdin)

    return invoke


@pytest.fixture
def generate(run: Run, target: Path) -> Run:
    """Runs ``outpace generate`` with the tiny target."""

    def invoke(*arguments: Any, stdin: bytes | None = None) -> Any:
        return run("generate", "--model", target, *arguments, stdin=stdin)

    return invoke


@pytest.fixture
def records(generate: Run) -> Callable[..., list[dict[str, Any]]]:
    """Runs ``outpace generate --json`` with the tiny target and returns its objects."""

    def invoke(*arguments: Any, stdin: bytes | None = None) -> list[dict[str, Any]]:
        result = generate("--json", *arguments, stdin=stdin)
        assert result.exit_code == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    return invoke
