"""OpenVINO GenAI as a contestant: the same weights, rounded as it is said, whole or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from lab import openvino_ir
from lab.openvino_ir import GROUP, four_bits

from outpace.bench.contest import BatchJob
from outpace.bench.peers import openvino
from outpace.bench.peers.registry import Models, peers
from outpace.bench.synthetic import Pair
from outpace.targets.cpu.weights.quantize import quantize
from outpace.targets.hf.gguf.load import read_dequantized
from outpace.targets.hf.loading.load import load
from targets.gguf.files import tiny, write

PRECISE = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def scores(folder: str, ids: torch.Tensor, **options: str) -> torch.Tensor:
    """Returns the logits ``[1, T, V]`` that OpenVINO computes with a converted model."""
    ov = pytest.importorskip("openvino")
    path = f"{folder}/openvino_model.xml"
    request = ov.Core().compile_model(path, "CPU", {**PRECISE, **options}).create_infer_request()
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(ids.shape[1])[None],
        "beam_idx": torch.zeros(1, dtype=torch.int32),
    }
    request.infer({name: one.numpy() for name, one in given.items()})
    return torch.tensor(request.get_tensor("logits").data)


def test_openvino_multiplies_by_the_same_integers(pair: Pair) -> None:
    """With its own rounding of activations off, what is left to differ is the last bits."""
    pytest.importorskip("openvino_tokenizers")
    ids = torch.arange(24)[None]
    folder = openvino.converted(pair.target, "int8")
    theirs = scores(folder, ids, DYNAMIC_QUANTIZATION_GROUP_SIZE="0")
    with torch.inference_mode():
        model = load(pair.target, cpu_kernels="off").model
        plain = model(input_ids=ids).logits
        quantize(model, "int8")  # with a scale for each output, as OpenVINO has it
        ours = model(input_ids=ids).logits
    assert (theirs - ours).std() < 0.1 * (plain - ours).std()


def test_openvino_holds_four_bits_in_groups() -> None:
    ov = pytest.importorskip("openvino")
    weight = torch.randn(3, 2 * GROUP, generator=torch.Generator().manual_seed(0))
    node = four_bits(weight.numpy())
    model = ov.Model([node.output(0)], [], "weight")
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = torch.tensor(compiled([])[0])
    largest = weight.reshape(3, 2, GROUP).abs().amax(2, keepdim=True) / 7
    step = largest.expand(3, 2, GROUP).reshape(weight.shape)
    assert found.shape == weight.shape
    assert ((found - weight).abs() <= step * 0.5001).all()
    assert len(found[0, :GROUP].unique()) <= 16


def test_an_interrupted_conversion_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of 8-bit weights begins as a copy of the plain one: half done, it would be taken for
    8 bits and hold 32."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    made: list[str] = []

    def plain(model: str, out: Path) -> None:
        out.mkdir(parents=True)
        (out / openvino.LAST).write_text("plain")

    def quantised(whole: Path, out: Path, kind: str) -> None:
        plain("", out)
        made.append(kind)
        if len(made) == 1:
            raise KeyboardInterrupt
        (out / "weights").write_text(kind)

    monkeypatch.setattr(openvino_ir, "save_ir", plain)
    monkeypatch.setattr(openvino_ir, "save_quantised", quantised)
    with pytest.raises(KeyboardInterrupt):
        openvino.converted("a/model", "int8")
    for _ in range(2):
        assert (Path(openvino.converted("a/model", "int8")) / "weights").read_text() == "int8"
    assert made == ["int8", "int8"]
    assert len(list((tmp_path / "outpace-openvino").iterdir())) == 2


def test_openvino_writes_the_same_greedy_text(pair: Pair) -> None:
    pytest.importorskip("openvino_genai")
    models = Models(pair.target, pair.drafter, "float32", "cpu")
    job = BatchJob(((3, 1, 4, 1, 5), (9, 2, 6)), 12, 0.0)
    plain, *others = [c.run(job).texts for c in peers(["hf", "openvino"], models)]
    assert len(others) == 3
    assert all(texts == plain for texts in others)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_file_is_converted_with_its_weights_as_numbers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino_tokenizers")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    file = str(write(tmp_path / "tiny.gguf", "qwen2", tiny("qwen2"), kind))
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        ours = read_dequantized(file)(input_ids=ids).logits
    torch.testing.assert_close(scores(openvino.converted(file), ids), ours, rtol=0, atol=1e-3)


def test_a_gguf_file_runs_in_four_bits_of_openvinos_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino_genai")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    file = str(write(tmp_path / "tiny.gguf", "qwen2", tiny("qwen2"), "Q8_0"))
    found = peers(["openvino"], Models(file, file, "float32", "cpu"))
    assert [one.what for one in found] == [
        "OpenVINO GenAI, plain, int4 weights",
        "OpenVINO GenAI, 3 assistant tokens, int4 weights",
        "OpenVINO GenAI, 5 assistant tokens, int4 weights",
    ]
    texts = [one.run(BatchJob(((3, 1, 4, 1, 5),), 12, 0.0)).texts for one in found]
    assert [len(text) for (text,) in texts] == [12, 12, 12]
