"""Loads a model whose weights are split over several processes, by transformers' plan for its kind:
which layers by their columns and which by their rows."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outpace.core.progress import Progress, silent
from outpace.errors import ConfigError, UnsupportedModel, reason_of, refuse
from outpace.targets.base import KVCacheDtype
from outpace.targets.cpu.kernels import EXPLICIT_KERNELS
from outpace.targets.cpu.threads import share_threads, use_threads
from outpace.targets.hf import support, trials
from outpace.targets.hf.cache import find_cache
from outpace.targets.hf.generating import generation
from outpace.targets.hf.gguf.header import is_gguf
from outpace.targets.hf.kinds import INSTALLED, placeholders, reads_sources
from outpace.targets.hf.loading.load import check_trust
from outpace.targets.hf.loading.loaded import LoadedModel, check_tokenizer, max_length_of
from outpace.targets.hf.loading.placing import pick_device, pick_dtype
from outpace.targets.hf.loading.prepare import set_up
from outpace.targets.hf.loading.reading import (
    read_config,
    read_tokenizer_of,
    read_weights,
    without_loading_bars,
)
from outpace.targets.hf.loading.source import check_path, locate
from outpace.targets.hf.prefixes import PrefixStore
from outpace.targets.hf.recurrent.families import has_recurrent_states
from outpace.targets.hf.target import HFTarget
from outpace.targets.parallel.calls import Call
from outpace.targets.parallel.processes import Processes, started_with

OUT = "leave tensor_parallel_size out"

KEYS = ("k_proj", "qkv_proj", "query_key_value", "kv_b_proj")
"""What models call the layers that make keys."""


@dataclass(frozen=True)
class SplitModel(LoadedModel):
    """A model of which this process, the first one, holds a part."""

    processes: Processes = field(kw_only=True)
    """All that hold it."""
    number: int = field(kw_only=True)
    """What they call it."""


def device_of(asked: str, local: int, count: int = 1) -> str:
    """Returns the name of the device of the process with this number on its machine, where there
    are several: the GPU with that number, where GPUs are asked for or found. asked: as `load`
    takes it. count: processes that this machine has to have a GPU for, from this one on. Raises
    ``ConfigError`` where it cannot have one of its own.

    This has not been run on a GPU yet.
    """
    if asked.startswith("cuda:"):
        raise ConfigError(
            f"{asked} is one GPU for several processes, each of which needs one of its own: leave "
            "the device out."
        )
    if asked not in ("auto", "cuda") or not torch.cuda.is_available():
        return asked
    if local + count > torch.cuda.device_count():
        raise ConfigError(
            f"there are more processes on this machine than GPUs ({torch.cuda.device_count()}): "
            "start one for each GPU."
        )
    return f"cuda:{local}"


# -- what is refused -------------------------------------------------------------------------------


def check_options(
    *,
    quantization: str | None,
    lora: object,
    processor: object,
    cpu_kernels: str,
    compiled: bool,
    batch_invariant: bool,
    device_map: object,
) -> None:
    """Raises ``ConfigError`` for arguments of ``LLM`` that do not go with a split model."""
    reasons = {
        "quantization": quantization is not None and "quantised weights are not split",
        "lora": lora is not None and "adapters are not split",
        "processor": processor is not None and "models that read images are not split",
        f"cpu_kernels={cpu_kernels!r}": (cpu_kernels == "tune" or cpu_kernels in EXPLICIT_KERNELS)
        and "layers of our own are not split",
        "compile=True": compiled and "its passes are neither compiled nor recorded",
        "device_map": device_map is not None and "each process has its part on one device",
        "batch_invariant": batch_invariant and "sums over processes depend on what is in a pass",
    }
    refuse("a model over several processes", reasons)


def check_config(config: Any, count: int) -> None:
    """Raises ``UnsupportedModel`` where the configuration tells that a model cannot be split."""
    text = config.get_text_config()
    plan: Mapping[str, str] = text.base_model_tp_plan or {}
    reason = None
    if reads_sources(config):
        reason = "it is an encoder-decoder"
    elif placeholders(config):
        reason = "it reads images"
    elif has_recurrent_states(config):
        reason = "it keeps recurrent states"
    elif getattr(config, "quantization_config", None):
        reason = "its weights are quantised"
    elif not plan:
        reason = f"transformers {INSTALLED} has no plan for that (base_model_tp_plan)"
    if reason is not None:
        raise UnsupportedModel(
            f"a model of type {config.model_type!r} is not split over processes, since {reason}: "
            f"{OUT}."
        )
    split = {name.rsplit(".", 1)[-1] for name, style in plan.items() if style == "colwise"}
    for name, value in text.to_dict().items():
        keys = name.endswith("key_value_heads") and bool(split.intersection(KEYS))
        queries = name.endswith("attention_heads") and any("q" in each for each in split)
        heads = value if isinstance(value, list) else [value]
        if (keys or queries) and any(type(each) is int and each % count for each in heads):
            raise UnsupportedModel(
                f"a model of type {config.model_type!r} with {value} heads ({name}) is not split "
                f"over {count} processes, which cannot share them evenly: use another "
                f"tensor_parallel_size, or {OUT}."
            )


def _check_accelerator(device: torch.device) -> None:
    """Raises ``ConfigError`` where transformers would put the parts elsewhere."""
    found = torch.accelerator.current_accelerator()
    kind = "cpu" if found is None else found.type
    if device.type == kind:
        return
    remedy = "hide the GPUs (CUDA_VISIBLE_DEVICES=), or leave the device out"
    raise ConfigError(
        f"transformers splits a model over what torch finds here, which is {kind!r}, and not over "
        f"{device.type!r}: {remedy if kind == 'cuda' else OUT}."
    )


# -- what every process does -----------------------------------------------------------------------


@dataclass(frozen=True)
class ShardSpec:
    """What every process needs to know to read its part of a model."""

    name: str
    """The folder, or the name on the hub."""
    dtype: torch.dtype | str
    trust_remote_code: bool
    count: int


def read_part(part: ShardSpec, others_have_read: Callable[[], None]) -> nn.Module:
    """Returns this process's part of a model, which all of them have tried out together.

    others_have_read: returns when the other processes have read theirs.
    """
    trust = part.trust_remote_code
    source = locate(part.name)
    config = read_config(source, part.name, trust)
    model = read_weights(source, part.name, config, part.dtype, trust)
    model = _split(model.eval(), part.count)
    others_have_read()
    set_up(model)
    with torch.no_grad():
        trials.probe(model)
    return model


def make_shard_target(
    model: nn.Module,
    rows: int,
    max_length: int,
    saved: tuple[int, int | None],
    kv_cache_dtype: KVCacheDtype,
) -> HFTarget:
    """Returns this process's part of a target. saved: the arguments of its `PrefixStore`."""
    texts = PrefixStore(*saved)
    return HFTarget(model, rows, max_length, saved=texts, kv_cache_dtype=kv_cache_dtype)


def _split(model: Any, count: int) -> nn.Module:
    """Leaves this process its part of a model's weights, on its device.

    transformers can read the parts alone, but wants accelerate for that. Here the whole files are
    mapped to memory, and each weight is let go of once its part was copied. Raises ``ConfigError``
    for a transformers that splits no models.
    """
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        config, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_size=count))
        split = model.maybe_distribute_model
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"transformers {INSTALLED} splits no model over processes: install a later one, or "
            f"{OUT}."
        ) from error
    _untie(model)
    try:
        found: Any = split(model, config, mesh)
    except ValueError as error:  # older versions share out even numbers only
        raise UnsupportedModel(
            f"transformers {INSTALLED} does not split {type(model).__name__} over {count} "
            f"processes ({reason_of(error).rstrip('.')}): install a later one, or {OUT}."
        ) from error
    found.tie_weights()
    accelerator = torch.accelerator.current_accelerator()
    return found if accelerator is None else found.to(accelerator)  # type: ignore[no-any-return]


def _untie(model: nn.Module) -> None:
    """Gives each module parameters of its own, over the same numbers: transformers splits weights
    before it ties them."""
    known: set[int] = set()
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) in known:
                weight = nn.Parameter(weight.data, requires_grad=False)
                setattr(module, name, weight)
            weight.requires_grad_(False)
            known.add(id(weight))


def shared_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns by name what is called by itself: the model, its embeddings and its output matrix."""
    loaded: Any = model
    embeddings, head = loaded.get_input_embeddings(), loaded.get_output_embeddings()
    return {"model": model, "embeddings": embeddings, "head": head}


# -- what the first one does -----------------------------------------------------------------------


def load_split(
    model: str,
    count: int,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    check_length: Callable[[int], None] | None = None,
) -> SplitModel:
    """Returns a model whose weights are split over ``count`` processes, which are started here,
    unless torchrun has started them.

    threads: of each process on a CPU; unset: its share of this process's processors. The other
    arguments are those of `load`, and so are its errors; ``ProcessLost`` where another process
    fails.
    """
    check_trust(trust_remote_code)
    check_tokenizer(tokenizer)
    joined = started_with(count) is not None  # other machines may have GPUs for the others
    local = int(os.environ.get("LOCAL_RANK") or 0) if joined else 0
    where = pick_device(device_of(str(device), local, 1 if joined else count))
    _check_accelerator(where)
    kind = pick_dtype(dtype, where)
    check_path(model)
    report = progress or silent
    report("looking for the model", 0.0)
    source = locate(model)
    if is_gguf(Path(source)):
        raise UnsupportedModel(
            f"{model!r} is a GGUF file, whose blocks of weights are not split over processes: name "
            f"the model's Hugging Face folder, or {OUT}."
        )
    generation.check_file(source)
    config = read_config(source, model, trust_remote_code)
    support.check_config(config)
    check_config(config, count)
    if check_length is not None:
        check_length(max_length_of(config.get_text_config()))
    if tokenizer is None:
        tokenizer = read_tokenizer_of(source, model, trust_remote_code)
    report(f"starting {count} processes", 0.1)
    used = share_threads(count) if threads is None else use_threads(threads)
    processes: Processes | None = None
    try:
        processes = Processes(count, where)
        report("reading the weights", 0.3)
        with nullcontext() if progress is None else without_loading_bars():
            part = ShardSpec(model, kind, trust_remote_code, count)
            found = read_split(processes, part, tokenizer, used)
    except BaseException:
        if processes is not None:
            processes.close()
        if threads is None:
            use_threads(None)
        raise
    report("loaded", 1.0)
    return found


def read_split(processes: Processes, part: ShardSpec, tokenizer: Any, threads: int) -> SplitModel:
    """Returns a model of which all processes read their parts."""
    number = processes.next_number()
    read = partial(read_part, part, lambda: processes.meet(f"read {number}"))
    with _local_rank():
        model = processes.call(Call("load", (number, part, threads)), read, to_its_end=False)
    weakref.finalize(model, processes.forget, number).atexit = False
    for name, module in shared_modules(model).items():
        own: Any = module
        own.forward = _shared(processes, number, name, module.forward)
    return SplitModel(
        model, tokenizer, part.name, cpu_kernels="off", processes=processes, number=number
    )


@contextmanager
def _local_rank() -> Iterator[None]:
    """Has the environment say which GPU is this process's, as torchrun does: transformers asks it
    while a model is read."""
    if "LOCAL_RANK" in os.environ:
        yield
        return
    os.environ["LOCAL_RANK"] = "0"
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]


def _shared(
    processes: Processes, number: int, name: str, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the ``forward`` of a model, or of a module that is called by itself, that is computed
    by all processes, also outside of a target's calls: one alone would wait for ever."""

    @functools.wraps(forward)
    def shared(*given: Any, **named: Any) -> Any:
        with processes.turn:
            if find_cache(named) is not None and not processes.inside:
                raise UnsupportedModel(
                    "a model over several processes is not called with a cache of one's own: "
                    f"generate with LLM, or {OUT}."
                )
            call = Call("compute", (number, name, given, named))
            return processes.call(call, partial(forward, *given, **named))

    return shared
