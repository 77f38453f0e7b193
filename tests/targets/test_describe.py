"""``LLM.describe()`` and ``LLM(threads=...)``: what runs, on how many threads, what is slow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from outpace import LLM
from outpace.errors import ConfigError
from outpace.targets import describe as describing
from outpace.targets.cpu import kernels as choosing
from outpace.targets.cpu import threads
from outpace.targets.cpu.kernels import MIN_ELEMENTS
from outpace.targets.cpu.native import Build, native
from outpace.targets.cpu.native_layers import layer as native_layer
from outpace.targets.cpu.native_layers import model as native_model
from outpace.targets.cpu.threads import processors, share_threads, use_threads
from outpace.targets.describe import computed_parts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MIN_ELEMENTS:
        monkeypatch.setitem(MIN_ELEMENTS, name, 1)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(native() is None, reason="no C++ compiler here")
def test_what_runs_is_said(folder: Path) -> None:
    config = {"model": str(folder), "quantization": "int8"}
    found = LLM(folder, speculative_config=config).describe()
    assert (found.kernels, found.native_layers, found.layers) == ("native", 2, 2)
    assert found.whole_model
    assert found.slow is None
    assert found.drafter is not None
    assert (found.drafter.quantization, found.drafter.kernels) == ("int8", "integer")
    line = str(found)
    assert "\n" not in line
    assert f"{folder} on cpu ({found.instructions}, 1 thread), float32: native kernels" in line
    assert "2 of 2 layers in native code, in one call" in line
    assert "drafter" in line
    assert "int8 in float32" in line
    with pytest.raises(FrozenInstanceError):
        found.threads = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "kernels", "part"),
    [
        ({"cpu_kernels": "off"}, "plain", "plain kernels"),
        ({"cpu_kernels": "packed"}, "packed", "packed kernels"),
        ({"dtype": "float64"}, "plain", "float64: plain"),
    ],
)
def test_what_was_asked_for_is_not_called_slow(
    folder: Path, options: dict[str, Any], kernels: str, part: str
) -> None:
    found = LLM(folder, **options).describe()
    assert (found.kernels, found.native_layers, found.slow) == (kernels, 0, None)
    assert part in str(found)


def test_a_race_is_named(folder: Path) -> None:
    assert "chosen by a race" in str(LLM(folder, cpu_kernels="tune").describe())


def test_without_a_compiler_it_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (choosing, describing):
        monkeypatch.setattr(module, "build", lambda: Build(None, "g++ is not found"))
    for module in (native_layer, native_model):
        monkeypatch.setattr(module, "native", lambda: None)
    found = LLM(folder, speculative_config={"model": str(folder)}).describe()
    assert found.kernels != "native"
    assert found.slow is not None
    assert found.slow.endswith("install a C++ compiler (such as g++), or name one in CXX")
    assert str(found).count("g++ is not found") == 1


def test_a_model_object_keeps_its_layers_and_says_so(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    found = LLM(model).describe()
    assert found.kernels == "plain"
    assert found.slow is not None
    assert found.slow.endswith("give the model's path or hub name instead")


# -- threads -----------------------------------------------------------------------------------


def test_threads_are_those_asked_for(folder: Path) -> None:
    found = LLM(folder, threads=2).describe()
    assert found.threads == torch.get_num_threads() == 2
    assert "2 threads" in str(found)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2", [1]])
def test_other_numbers_of_threads_are_refused(wrong: Any) -> None:
    before = torch.get_num_threads()
    with pytest.raises(ConfigError, match=r"threads must be (at least 1|a whole number), not"):
        LLM(threads=wrong)
    assert torch.get_num_threads() == before


def test_far_more_threads_than_processors_are_refused() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ConfigError, match=r"threads must be at most \d+, not 10000: this process"):
        LLM(threads=10000)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("set_to", "limit", "count"), [(4, 2, 2), (2, 4, 2), (3, 1, 1)])
def test_by_default_there_are_no_more_than_processors(
    set_to: int, limit: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(set_to)
    monkeypatch.setattr(threads, "processors", lambda: limit)
    assert use_threads(None) == torch.get_num_threads() == count


def test_a_share_of_the_threads_is_always_one_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(16)
    monkeypatch.setattr(threads, "processors", lambda: 16)
    for _ in range(2):
        assert share_threads(2) == torch.get_num_threads() == 8
    assert use_threads(None) == torch.get_num_threads() == 16
    assert share_threads(32) == 1


def test_a_number_that_was_set_since_is_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(16)
    monkeypatch.setattr(threads, "processors", lambda: 16)
    share_threads(2)
    torch.set_num_threads(6)
    assert use_threads(None) == 6
    share_threads(2)
    use_threads(3)
    assert use_threads(None) == 3


@pytest.mark.parametrize(
    ("membership", "files", "count"),
    [
        ("", {}, 8),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/out/of/sight", {"cpu.max": "50000 100000"}, 1),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "1"}, 8),
        ("4:cpu:/x", {"cpu/x/cpu.cfs_quota_us": "400", "cpu/x/cpu.cfs_period_us": "100"}, 4),
        ("5:memory:/", {"cpu.max": "100000 100000"}, 8),
        ("0::/", {"cpu.max": "nonsense"}, 8),
    ],
)
def test_a_containers_quota_counts(
    membership: str,
    files: dict[str, str],
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(threads, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(threads, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert processors() == count


def test_parts_have_their_kernels_and_the_bytes_of_a_pass(folder: Path) -> None:
    loaded = LLM(folder, cpu_kernels="off").target
    parts = computed_parts(loaded)
    found = [(part.name, part.count, part.kernels, part.native_code) for part in parts]
    assert found == [
        ("embedding", 1, "looked up", 0),
        ("self_attn", 2, "plain", 0),
        ("mlp", 2, "plain", 0),
        ("output matrix", 1, "plain", 0),
    ]
    # 64 wide; queries and outputs 64, keys and values 32 each; three matrices of 96; 96 tokens
    sizes = [0, 2 * 64 * (64 + 64 + 32 + 32), 2 * 3 * 64 * 96, 64 * 96]
    assert [part.nbytes for part in parts] == [4 * size for size in sizes]
    assert {part.held for part in parts} == {"float32"}


@pytest.mark.skipif(native() is None, reason="no C++ compiler here")
def test_parts_in_native_code_are_counted(folder: Path) -> None:
    parts = {part.name: part for part in computed_parts(LLM(folder).target)}
    assert {part.kernels for part in parts.values()} == {"looked up", "native"}
    assert (parts["self_attn"].native_code, parts["mlp"].native_code) == (2, 2)


def test_a_table_of_positions_is_no_part() -> None:
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    names = [part.name for part in computed_parts(LLM(model).target)]
    assert names == ["embedding", "attn", "mlp", "output matrix"]
