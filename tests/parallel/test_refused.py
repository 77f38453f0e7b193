"""What is not split over processes is refused, mostly before any is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import LLM
from outpace.errors import ConfigError, UnsupportedModel
from outpace.targets.parallel.load import _split, check_config, device_of
from outpace.targets.parallel.processes import started_with
from targets.families import build, target


@pytest.fixture(autouse=True)
def _not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> None:
        raise AssertionError("processes were started for what is refused")

    monkeypatch.setattr("outpace.targets.parallel.load.Processes", start)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("llama")
    target("llama").save_pretrained(found)
    return str(found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantization": "int8"}, "quantization does not go with"),
        ({"cpu_kernels": "packed"}, "cpu_kernels='packed' does not go with"),
        ({"cpu_kernels": "tune"}, "cpu_kernels='tune' does not go with"),
        ({"compile": True}, "compile=True does not go with"),
        ({"batch_invariant": True}, "batch_invariant does not go with"),
        ({"device": "cuda:1"}, "cuda:1 is one GPU for several processes"),
        ({"tensor_parallel_size": 3}, "num_attention_heads.* is not split over 3 processes"),
        ({"tensor_parallel_size": 4}, "2 heads .num_key_value_heads. is not split over 4"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
    ],
)
def test_options(options: dict[str, Any], said: str, folder: str) -> None:
    with pytest.raises((ConfigError, UnsupportedModel), match=said):
        LLM(folder, **{"tensor_parallel_size": 2, **options})


@pytest.mark.parametrize(("threads", "left"), [(None, 4), (2, 2)])
def test_threads_are_no_longer_shared_after_a_failure(
    threads: int | None, left: int, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.targets.cpu.threads.processors", lambda: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with pytest.raises(AssertionError, match="processes were started"):
            LLM(folder, tensor_parallel_size=2, threads=threads)
        assert torch.get_num_threads() == left
    finally:
        torch.set_num_threads(before)


def test_a_loaded_model() -> None:
    with pytest.raises(ConfigError, match="whole in this process"):
        LLM(target("llama"), tensor_parallel_size=2)


def test_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(200))
    with pytest.raises(UnsupportedModel, match="GGUF file, whose blocks"):
        LLM(str(file), tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("mamba", "recurrent states"),
        ("gpt2", "no plan"),
        ("bloom", "no plan"),
        ("gpt_oss", "no plan"),
    ],
)
def test_kinds_of_models(family: str, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        check_config(build(family).config, 2)


def test_a_transformers_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.distributed.configuration_utils", None)
    with pytest.raises(ConfigError, match="splits no model over processes: install a later one"):
        _split(build("llama"), 2)


def test_other_numbers_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert started_with(2) is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert started_with(4) == 1
    with pytest.raises(ConfigError, match="torchrun has started 4 processes"):
        started_with(2)


def test_machines_with_fewer_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("auto", 0, 2) == "cuda:0"
    with pytest.raises(ConfigError, match=r"more processes on this machine than GPUs \(2\)"):
        device_of("auto", 0, 4)
