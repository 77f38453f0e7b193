"""transformers as a contestant: plain ``generate`` and assisted generation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from outpace.bench.contest import BatchJob, BatchTexts, Contestant
from outpace.bench.peers.registry import Models, drafter_of, is_gguf
from outpace.targets.hf.gguf.load import read_dequantized
from outpace.targets.hf.loading.placing import pick_device, pick_dtype

SETTINGS = {
    "3": (3, "constant", 0.0),
    "5": (5, "constant", 0.0),
    "heuristic": (5, "heuristic", 0.0),
    "default": (20, "constant", 0.4),
}
"""By name: the number of assistant tokens, their schedule, and the confidence below which drafting
stops. The last one is the default of transformers."""


class HfPlain(Contestant):
    """transformers' own ``model.generate``, on a model that nothing else uses."""

    def __init__(self, model: Any) -> None:
        self.name = "hf"
        self.what = "transformers generate"
        self._model = model

    @torch.inference_mode()
    def run(self, job: BatchJob) -> BatchTexts:
        width = max(map(len, job.prompts))
        ids = [[0] * (width - len(p)) + list(p) for p in job.prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in job.prompts]
        device = self._model.device
        options: dict[str, Any] = {"do_sample": False}
        if job.temperature > 0:
            options = {
                "do_sample": True,
                "temperature": job.temperature,
                "top_k": 0,
                "top_p": 1.0,
            }
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(job.seed)
            found = self._model.generate(
                torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=job.max_tokens,
                **options,
                **self._extra(),
            )
        return BatchTexts(found[:, width:].tolist())

    def _extra(self) -> dict[str, Any]:
        return {}

    @property
    def nbytes(self) -> int:
        return int(self._model.get_memory_footprint())


class HfAssisted(HfPlain):
    """``generate(assistant_model=...)`` with one schedule."""

    def __init__(self, model: Any, assistant: Any, setting: str) -> None:
        super().__init__(model)
        self._assistant = assistant
        self._count, self._schedule, self._threshold = SETTINGS[setting]
        self.name = f"hf-assisted-{setting}"
        self.what = (
            f"transformers assisted generation, {self._count} tokens, {self._schedule}, "
            f"confidence {self._threshold}"
        )

    def refusal(self, batch: int, temperature: float) -> str | None:
        return "transformers' assisted generation runs batch 1 only" if batch > 1 else None

    def run(self, job: BatchJob) -> BatchTexts:
        # Set anew before each run, because the heuristic schedule changes it during a run.
        config = self._assistant.generation_config
        config.num_assistant_tokens = self._count
        config.num_assistant_tokens_schedule = self._schedule
        config.assistant_confidence_threshold = self._threshold
        return super().run(job)

    def _extra(self) -> dict[str, Any]:
        return {"assistant_model": self._assistant}

    @property
    def nbytes(self) -> int:
        return super().nbytes + int(self._assistant.get_memory_footprint())


def plain(models: Models, variants: Sequence[str]) -> list[Contestant]:
    """Returns plain generation."""
    return [HfPlain(_loaded(models.target, models)) for _ in variants]


def assisted(models: Models, variants: Sequence[str]) -> list[Contestant]:
    """Returns assisted generation with each of these settings, on one copy of the weights."""
    drafter = drafter_of(models, "hf-assisted")
    model, assistant = _loaded(models.target, models), _loaded(drafter, models)
    return [HfAssisted(model, assistant, setting) for setting in variants]


def _loaded(path: str, models: Models) -> Any:
    device = pick_device(models.device)
    kind = pick_dtype(models.dtype, device)
    model: Any
    if is_gguf(path):  # transformers has no products of blocks, and is fastest in bfloat16
        model = read_dequantized(path)
        for weight in model.parameters():  # and no buffers: those of positions hold angles
            weight.data = weight.data.to(torch.bfloat16)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=kind)
    # No end token, so that texts run to their length, and no option besides the temperature.
    config: Any = transformers.GenerationConfig
    model.generation_config = config(pad_token_id=0)
    return model.to(device).eval()
