"""outpace: speculative decoding for Hugging Face models.

Faster text, the same words.

    from outpace import LLM, SamplingParams

    llm = LLM("target", speculative_config={"model": "drafter"})
    print(llm.generate("Once upon a time", SamplingParams(temperature=0.8))[0].text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.config import SpeculativeConfig
    from outpace.core.beam_params import BeamSearchParams
    from outpace.core.params import SamplingParams
    from outpace.llm import LLM
    from outpace.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        Chunk,
        CompletionOutput,
        RequestOutput,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "Chunk",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "__version__",
]

_HOMES = {
    "LLM": "outpace.llm",
    "BeamSearchOutput": "outpace.outputs",
    "BeamSearchParams": "outpace.core.beam_params",
    "BeamSearchSequence": "outpace.outputs",
    "Chunk": "outpace.outputs",
    "CompletionOutput": "outpace.outputs",
    "RequestOutput": "outpace.outputs",
    "SamplingParams": "outpace.core.params",
    "SpeculativeConfig": "outpace.config",
}


def __getattr__(name: str) -> Any:
    # Loaded when first used: torch and transformers take seconds, which `outpace --help` need not.
    if name not in _HOMES:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
