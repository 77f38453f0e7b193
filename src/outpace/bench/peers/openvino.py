"""OpenVINO GenAI as a contestant on CPUs: plain, and speculative with a draft model."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outpace.bench.contest import BatchJob, BatchTexts, Contestant
from outpace.bench.peers.registry import Models, drafter_of
from outpace.core.extras import extra, lab_module
from outpace.errors import ConfigError
from outpace.targets.hf.loading.source import names_gguf

INSTALL = "outpace[peers]"
LAST = "openvino_detokenizer.xml"
"""The file of a converted model that is written last."""
FOR_BLOCKS = "int4"
"""What the weights of a GGUF file are rounded to again, in OpenVINO's own form of 4 bits."""


class OpenVino(Contestant):
    """One pipeline. Its cache is in float32, as everybody's here; its default would be 8 bits."""

    def __init__(self, pipeline: Any, count: int | None, form: str | None) -> None:
        """form: what the target's weights are rounded to; None if they are as in its files."""
        self.name = "openvino" if count is None else f"openvino-speculative-{count}"
        how = "plain" if count is None else f"{count} assistant tokens"
        self.what = ", ".join(["OpenVINO GenAI", how, *([f"{form} weights"] if form else [])])
        self._pipeline, self._count = pipeline, count

    def refusal(self, batch: int, temperature: float) -> str | None:
        if temperature > 0 and self._count is not None:
            return "OpenVINO GenAI's speculative sampling does not sample the target's distribution"
        return None

    def run(self, job: BatchJob) -> BatchTexts:
        genai, ov = _packages()
        config = genai.GenerationConfig()
        config.max_new_tokens = job.max_tokens
        config.set_eos_token_id(0)  # a model without one gets -1, which is refused; see next line
        config.ignore_eos = True
        config.do_sample = job.temperature > 0
        if job.temperature > 0:
            config.temperature = job.temperature
            config.rng_seed = job.seed
        if self._count is not None:
            config.num_assistant_tokens = self._count
        width = max(map(len, job.prompts))
        ids = np.array([[0] * (width - len(p)) + list(p) for p in job.prompts], dtype=np.int64)
        mask = np.array([[0] * (width - len(p)) + [1] * len(p) for p in job.prompts], np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(mask))
        found = self._pipeline.generate(inputs, config)
        return BatchTexts([list(text) for text in found.tokens])


def contestants(models: Models, variants: Sequence[str]) -> list[Contestant]:
    """Returns OpenVINO GenAI, plain or with a number of draft tokens, as each variant says."""
    _packages()
    if models.dtype != "float32" or models.device != "cpu":
        raise ConfigError(
            "the OpenVINO peer is converted in float32 for the CPU, and this run is "
            f"{models.dtype} on {models.device}: leave 'openvino' out of --vs."
        )
    form = _form(models.target, models.quantization)
    counts = [
        None if variant == "plain" else int(variant.removeprefix("speculative-"))
        for variant in variants
    ]
    plain = _pipeline(models, speculative=False) if None in counts else None
    drafting = _pipeline(models, speculative=True) if any(counts) else None
    return [OpenVino(drafting if count else plain, count, form) for count in counts]


def _form(model: str, quantization: str | None) -> str | None:
    """What OpenVINO's copy of the weights is rounded to; None: nothing. Those of a GGUF file are in
    blocks, which it cannot take over."""
    return FOR_BLOCKS if quantization is None and names_gguf(model) else quantization


def _pipeline(models: Models, speculative: bool) -> Any:
    """A pipeline. With 8-bit weights it rounds activations to 8 bits too, which is its default."""
    genai, _ = _packages()
    options: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    folder = converted(models.target, _form(models.target, models.quantization))
    try:
        if not speculative:
            return genai.LLMPipeline(folder, "CPU", **options)
        drafter = drafter_of(models, "openvino")
        small = converted(drafter, _form(drafter, models.drafter_quantization))
        draft = genai.draft_model(small, "CPU", **options)
        return genai.LLMPipeline(folder, "CPU", draft_model=draft, **options)
    except RuntimeError as error:
        first = str(error).strip().splitlines()[-1]
        raise ConfigError(f"OpenVINO GenAI does not load the converted model: {first}") from error


def converted(model: str, quantization: str | None = None) -> str:
    """Returns the folder of a model's IR, made on first use and kept among temporary files."""
    if quantization is not None:
        plain = Path(converted(model))
        folder = plain.with_name(f"{plain.name}-{quantization}")
        return _whole(folder, lambda new: _exporter().save_quantised(plain, new, quantization))
    key = hashlib.sha256(f"{Path(model).resolve()} {_stamp(Path(model))}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / "outpace-openvino" / key
    return _whole(folder, lambda new: _exporter().save_ir(model, new))


def _stamp(model: Path) -> int:
    """When a model's folder or file was last changed; 0 for a name on the hub."""
    known = model / "config.json" if (model / "config.json").exists() else model
    return known.stat().st_mtime_ns if known.exists() else 0


def _whole(folder: Path, make: Callable[[Path], None]) -> str:
    """Returns a folder that ``make`` has written. It is there with all files or not at all: a
    conversion that was interrupted must not be taken for one that is done."""
    if not (folder / LAST).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as begun:
            new = Path(begun) / folder.name
            make(new)
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)
    return str(folder)


def _exporter() -> Any:
    return lab_module("openvino_ir", "what converts a model for the OpenVINO peer")


def _packages() -> tuple[Any, Any]:
    genai = extra("openvino_genai", "the OpenVINO peer", INSTALL)
    return genai, extra("openvino", "the OpenVINO peer", INSTALL)
