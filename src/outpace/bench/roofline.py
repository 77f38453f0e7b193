"""Memory: the peak of a piece of work, how fast it can be read, and the bound that reading sets:
every weight once per pass, and each row's cache."""

from __future__ import annotations

import copy
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.transfer import synchronise
from outpace.llm import LLM
from outpace.methods.choosers.base import CompositeDrafter
from outpace.targets.hf.attention import num_kv_heads
from outpace.targets.hf.kinds import has_experts, is_encoder_decoder, sees_images
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.weights import pass_bytes

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass
class Peak:
    """The most bytes held at once: of GPU memory where there is a GPU, else by the process."""

    bytes: int = 0


@contextmanager
def peak_of() -> Iterator[Peak]:
    """Measures the peak memory of what runs inside, without a thread that would disturb it.

    On Linux the kernel's record of the peak is reset first. Elsewhere it cannot be reset, and the
    peak is that of the whole process so far.
    """
    peak = Peak()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):
            _CLEAR.write_text("5")  # documented in proc(5): resets VmHWM, nothing else
    yield peak
    peak.bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _high_water()


def _high_water() -> int:
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_bandwidth(device: torch.device, megabytes: int | None = None, repeats: int = 7) -> float:
    """Returns the bytes per second at which a matrix much larger than any cache is read.

    It is read by a product with a vector, as plain decoding reads weights, and by a sum; the
    fastest of all reads counts. megabytes: its size; unset: 512, and on a GPU 8192, where starting
    to read would be a part of the time of fewer.
    """
    if megabytes is None:
        megabytes = 8192 if device.type == "cuda" else 512
    columns = 4096
    rows = megabytes * 2**20 // (4 * columns)
    matrix = torch.ones(rows, columns, device=device)
    vector = torch.ones(columns, device=device)
    kernels: tuple[Callable[[], Tensor], ...] = (lambda: matrix @ vector, matrix.sum)
    best = float("inf")
    for _ in range(repeats):
        for kernel in kernels:
            synchronise(device)
            begin = perf_counter()
            kernel()
            synchronise(device)
            best = min(best, perf_counter() - begin)
    return matrix.nbytes / best


# -- the bound that reading sets ---------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """Bytes that one pass of a model has to read."""

    weights: int
    """All but an embedding table that is only looked up in."""
    per_cached_token: int
    """Keys and values."""

    def of_pass(self, batch: int, context: float) -> float:
        """Bytes of a pass over a batch with n cached tokens each."""
        return self.weights + batch * context * self.per_cached_token


def traffic_of(model: nn.Module, itemsize: int, kv_cache_dtype: str = "auto") -> Traffic:
    """Returns the traffic of a language model at some bytes per number. kv_cache_dtype: as for
    `LLM`; in 8 bits each key and value comes with a scale.

    Counted on another one of its kind without storage, so that what an engine does to its weights
    (packing, copying) does not change the bound that it is measured against.
    """
    config: Any = model.config
    text = config.get_text_config()
    with torch.device("meta"):
        weights = _numbers(type(model)(copy.deepcopy(config))) * itemsize
    vectors, size = _cached_vectors(text)
    each = size * itemsize if kv_cache_dtype == "auto" else size + itemsize
    return Traffic(weights, vectors * each)


def _cached_vectors(text: Any) -> tuple[int, int]:
    """The keys and values of one token, and the numbers of each; none in a model that keeps states
    instead, as Mamba does."""
    attending = getattr(text, "num_attention_heads", 0)
    heads = num_kv_heads(text) or attending
    if not heads or not attending:
        return 0, 0
    size = getattr(text, "head_dim", None) or text.hidden_size // attending
    return int(2 * text.num_hidden_layers * heads), int(size)


def _numbers(model: nn.Module) -> int:
    total = sum({id(p): p.numel() for p in model.parameters()}.values())
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    tied = getattr(model.config, "tie_word_embeddings", False) or (
        head is not None and head.weight is embedding.weight
    )
    if not tied:
        return int(total - embedding.weight.numel())
    separate = head is not None and head.weight is not embedding.weight
    return int(total - embedding.weight.numel()) if separate else int(total)


def reads_a_part(llm: LLM) -> bool:
    """Returns whether a pass of an engine's target or drafter reads a part of the weights only:
    that of a mixture of experts reads those experts that its tokens choose, that of an
    encoder-decoder its decoder, that of a vision-language model its language model. What is known
    here is how many weights there are, which then bounds nothing.
    """
    models = [each for each in (llm.target, llm.engine.drafter.loaded) if each is not None]
    return any(
        has_experts(each.config.to_dict())
        or is_encoder_decoder(each.model)
        or sees_images(each.model.config)
        for each in models
    )


def has_one_cost(llm: LLM) -> bool:
    """Returns whether drafts of one length always cost the same. Of several drafters that read
    more weights or less, or none, the number of drafted tokens does not say who drafted them, and
    so neither how long that took nor what was read."""
    drafter = llm.engine.drafter
    if not isinstance(drafter, CompositeDrafter):
        return True
    return len({child.pass_bytes for child in drafter.children}) == 1


def target_traffic(llm: LLM) -> Traffic:
    """Returns the traffic of an engine's target."""
    return _traffic(llm.target, llm.engine.target.kv_cache_dtype)


def drafter_traffic(llm: LLM) -> Traffic | None:
    """Returns the traffic of an engine's drafter, None unless it runs a model once for each drafted
    token."""
    drafter = llm.engine.drafter
    loaded = drafter.loaded
    if loaded is None or drafter.trees:
        return None
    found = _traffic(loaded)
    # It may read less than all: the part of its last layer that it needs.
    return replace(found, weights=drafter.pass_bytes) if loaded.packed else found


def _traffic(loaded: LoadedModel, kv_cache_dtype: str = "auto") -> Traffic:
    found = traffic_of(loaded.model, loaded.dtype.itemsize, kv_cache_dtype)
    rounded = loaded.packed or loaded.quantization is not None
    # What rounded weights take, scales and all, is the same whatever computes with them.
    return replace(found, weights=pass_bytes(loaded.model)) if rounded else found


def bound_seconds(
    rounds: Mapping[int, int],
    batch: int,
    context: float,
    bandwidth: float,
    target: Traffic,
    drafter: Traffic | None,
) -> float:
    """Returns the least seconds that these rounds' reads take at a bandwidth (bytes per second)."""
    passes = sum(rounds.values())
    moved = passes * target.of_pass(batch, context)
    if drafter is not None:
        drafted = sum(k * count for k, count in rounds.items())
        moved += drafted * drafter.of_pass(batch, context)
    return moved / bandwidth
