"""``outpace inspect``: every kind of file is recognised as loading it would, or named as what it is
not; without reading weights."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from outpace.core.values import shown
from outpace.heads.base import TargetShape
from outpace.heads.checkpoint import save_head
from outpace.heads.classifiers import Judge, JudgeConfig, ModelSignature, save_classifier
from outpace.heads.folder import HeadFolder
from outpace.llm import BUNDLED
from outpace.methods.heads.eagle import Eagle, EagleConfig
from outpace.methods.heads.eagle3 import Eagle3, Eagle3Config
from outpace.methods.heads.medusa import Medusa, MedusaConfig
from outpace.targets.hf.gguf import file
from outpace.targets.hf.loading.outline import outline_model
from targets.gguf.files import tiny, write
from targets.test_lora import adapter

Run = Callable[..., Any]
SHAPE = TargetShape(32, 96, 2, "the/target")
"""That of the tiny target."""


@pytest.fixture
def inspected(run: Run) -> Callable[..., dict[str, Any]]:
    """Runs ``outpace inspect --json`` and returns its object, checked against the exit code."""

    def invoke(*arguments: Any) -> dict[str, Any]:
        done = run("inspect", *arguments, "--json")
        assert done.exit_code in (0, 1), done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert (found["why_not"] is not None) == (done.exit_code == 1)
        return found

    return invoke


def test_a_model_is_described(inspected: Run, run: Run, target: Path, drafter: Path) -> None:
    found = inspected(target)
    assert found["kind"] == "model"
    facts = found["facts"]
    assert (facts["vocabulary"], facts["hidden_size"], facts["layers"]) == (96, 32, 2)
    assert (facts["context"], facts["dtype"]) == (8192, "F32")
    assert found["commands"][0] == f"outpace generate -m {target}"
    pair = inspected(drafter, "-m", target)
    assert pair["facts"]["tokens"] == "the target's"
    assert pair["commands"] == [f"outpace generate -m {target} --draft {drafter}"]
    told = run("inspect", drafter, "-m", target)
    assert told.exit_code == 0
    assert "fits the target  yes" in told.stdout
    assert f"outpace generate -m {target} --draft {drafter}" in told.stdout


def test_another_tokenizer_is_no_obstacle(inspected: Run, target: Path, stranger: Path) -> None:
    assert "translated" in inspected(stranger, "-m", target)["facts"]["tokens"]
    (stranger_without := stranger.with_name("without")).mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(stranger / name, stranger_without)
    assert inspected(stranger_without, "-m", target)["facts"]["tokens"] == "the target's"


FORMS = {
    "medusa": (Medusa, MedusaConfig(depths=2), ("outpace", "medusa")),
    "eagle3": (Eagle3, Eagle3Config(), ("outpace", "eagle3", "speculators")),
    "eagle": (Eagle, EagleConfig(), ("outpace", "eagle", "speculators")),
}


@pytest.mark.parametrize(("kind", "form"), [(kind, f) for kind, it in FORMS.items() for f in it[2]])
def test_heads_are_known_by_kind_and_format(
    inspected: Run, target: Path, tmp_path: Path, kind: str, form: str
) -> None:
    network, config, _ = FORMS[kind]
    place = tmp_path / "head"
    save_head(network(SHAPE, config), place, form)  # type: ignore[arg-type]
    found = inspected(place, "-m", target)
    assert found["why_not"] is None
    facts = found["facts"]
    assert (found["kind"], facts["format"]) == ("head", form)
    assert (facts["hidden_size"], facts["vocabulary"]) == (32, 96)
    method = " --method eagle" if (kind, form) == ("eagle", "eagle") else ""
    assert found["commands"] == [f"outpace generate -m {target}{method} --draft {place}"]
    assert "TARGET" in inspected(place)["commands"][0]
    save_head(network(TargetShape(64, 96, 2), config), tmp_path / "wide", form)  # type: ignore[arg-type]
    why = inspected(tmp_path / "wide", "-m", target)
    assert "its hidden_size is 64, and this target's is 32" in why["why_not"]
    assert not why["commands"]


def test_numbers_of_weights_are_not_read(
    inspected: Run, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_head(Medusa(SHAPE, MedusaConfig(depths=2)), tmp_path / "head")

    def read(*given: Any, **options: Any) -> Any:
        pytest.fail("weights were read")

    monkeypatch.setattr(HeadFolder, "check_numbers", read)
    monkeypatch.setattr("outpace.targets.hf.loading.load.read_weights", read)
    inspected(tmp_path / "head", "-m", target)


def test_classifiers_datastores_and_adapters(
    inspected: Run, run: Run, target: Path, stranger: Path, tmp_path: Path
) -> None:
    model_signature = ModelSignature(SHAPE, torch.randn(7, 32))
    save_classifier(Judge(model_signature, JudgeConfig()), tmp_path / "judge")
    found = inspected(tmp_path / "judge", "-m", target)
    assert (found["kind"], found["why_not"]) == ("classifier", None)
    assert '"verify": {"name": "judge"' in found["commands"][0]
    other = ModelSignature(TargetShape(32, 96, 9), torch.randn(7, 32))
    save_classifier(Judge(other, JudgeConfig()), tmp_path / "deep")
    assert "its layers is 9" in inspected(tmp_path / "deep", "-m", target)["why_not"]

    (tmp_path / "a.txt").write_text("w1 w2 w3 w4\n")
    store = tmp_path / "store"
    built = run("datastore", "build", tmp_path / "a.txt", "--out", store, "--model", target)
    assert built.exit_code == 0
    found = inspected(store, "-m", target)
    assert (found["kind"], found["facts"]["texts"], found["why_not"]) == ("datastore", 1, None)
    assert "another tokenizer" in inspected(store, "-m", stranger)["why_not"]
    assert '"method": "retrieval"' in found["commands"][0]
    words = ("datastore", "build", tmp_path / "a.txt", "--no-texts", "--model", target)
    assert run(*words, "--out", tmp_path / "table").exit_code == 0
    assert '"method": "suffix"' in inspected(tmp_path / "table", "-m", target)["commands"][0]

    place = adapter(tmp_path / "lora", LlamaForCausalLM.from_pretrained(target), ["q_proj"])
    found = inspected(place, "-m", target)
    assert (found["kind"], found["why_not"]) == ("adapter", None)
    assert found["facts"]["changes"] == ["q_proj"]
    assert found["commands"] == [f"outpace generate -m {target} --lora {place}"]
    assert inspected(place)["commands"] == [f"outpace generate -m some/base --lora {place}"]
    about = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps({**about, "peft_type": "IA3"}))
    assert "only LoRA adapters are read" in inspected(place)["why_not"]


def test_gguf_files(inspected: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", tiny("llama"), "Q8_0")
    found = inspected(path)
    assert "architecture llama" in found["what"]
    assert found["facts"]["blocks"]["Q8_0"] > 0.5
    assert inspected(tmp_path)["what"] == found["what"]
    other = write(tmp_path / "a.gguf", "llama", tiny("llama"), changes={"general.type": "adapter"})
    why = inspected(other)
    assert (why["what"], why["commands"]) == ("a GGUF file", [])
    assert "holds a LoRA adapter, not a language model" in why["why_not"]


def test_the_header_of_a_gguf_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "model.gguf", "llama", tiny("llama"), "Q8_0")
    read, plain = [], file.read_header
    monkeypatch.setattr(file, "read_header", lambda part: read.append(part) or plain(part))
    assert outline_model(str(path)).loaded.packed
    assert read == [path]


def test_what_is_typed_for_an_adapter_works(
    inspected: Run, run: Run, target: Path, tmp_path: Path
) -> None:
    place = adapter(tmp_path / "lora", LlamaForCausalLM.from_pretrained(target), ["q_proj"])
    words = shlex.split(inspected(place, "-m", target)["commands"][0])[1:]
    done = run(*words, "w1 w2", "--max-tokens", 4, "--verbose")
    assert done.exit_code == 0, done.stderr
    assert f"with the adapter {place}" in done.stderr


def test_weights_that_nobody_reads_are_a_reason(inspected: Run, copy_of_target: Path) -> None:
    config = json.loads((copy_of_target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt"}
    (copy_of_target / "config.json").write_text(json.dumps(config))
    found = inspected(copy_of_target)
    assert "are quantised with 'modelopt'" in found["why_not"]
    assert not found["commands"]


def test_the_bundled_head_fits_the_bundled_target(inspected: Run) -> None:
    found = inspected(BUNDLED / "heads" / "eagle3", "-m", BUNDLED / "target")
    assert found["why_not"] is None


# -- what cannot be read -----------------------------------------------------------------------


def test_bad_files_are_one_sentence(
    run: Run, target: Path, copy_of_target: Path, tmp_path: Path
) -> None:
    weights = copy_of_target / "model.safetensors"
    data = weights.read_bytes()
    cut = tmp_path / "cut"
    shutil.copytree(copy_of_target, cut)
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    empty = tmp_path / "empty"
    shutil.copytree(copy_of_target, empty)
    (empty / "model.safetensors").write_bytes(b"")
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "no_such_model"}')
    (unknown / "model.safetensors").write_bytes(data)
    (broken := tmp_path / "broken").mkdir()
    (broken / "config.json").write_text("cut sh")
    (broken / "model.safetensors").write_bytes(data)
    gguf = write(tmp_path / "g.gguf", "llama", tiny("llama"), "Q8_0")
    gguf.write_bytes(gguf.read_bytes()[:2000])
    (nothing := tmp_path / "nothing.gguf").write_bytes(b"")
    (text := tmp_path / "a.txt").write_text("a text")
    (bare := tmp_path / "bare").mkdir()
    for path, said in (
        (cut, "damaged or cut short"),
        (empty, "damaged or cut short"),
        (unknown, "model of type 'no_such_model', which transformers"),
        (broken, "cannot read"),
        (gguf, "damaged or cut short"),
        (nothing, "it is empty"),
        (text, "is a file: name the folder"),
        (bare, "has no config.json"),
        (tmp_path / "none", "there is no folder"),
        ("some/model", "no model of this name was downloaded before"),
        ("some/model:a.gguf", "no model of this name was downloaded before"),
    ):
        done = run("inspect", path)
        assert done.exit_code == 2, (path, done.stdout)
        assert said in " ".join(done.stderr.split()), shown(done.stderr)
        assert done.stderr.startswith("outpace: ")
        assert "Traceback" not in done.stderr
        assert "copy the head" not in done.stderr  # nobody knows of one
    assert run("inspect", target, "-m", tmp_path / "none").exit_code == 2


def test_a_missing_part_is_named(run: Run, copy_of_target: Path) -> None:
    (copy_of_target / "model.safetensors").rename(copy_of_target / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (copy_of_target / "model.safetensors.index.json").write_text(json.dumps(index))
    done = run("inspect", copy_of_target)
    assert done.exit_code == 2
    assert "lacks 1 of 2 files with weights (model-2.safetensors is one)" in done.stderr
