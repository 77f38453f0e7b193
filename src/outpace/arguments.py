"""The arguments of ``LLM``, each declared once, and what a caller gives with a call.

Nothing here imports torch, which takes seconds, before a value needs it: the command line makes its
flags from `EngineArgs`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le

from outpace.config import SpeculativeConfig
from outpace.core.beam_params import BeamSearchParams
from outpace.core.options import Reads, read_options
from outpace.core.params import SamplingParams
from outpace.core.progress import Progress
from outpace.core.values import folder, shown
from outpace.errors import ConfigError, ParamsError, UnknownArgument, names_checked

if TYPE_CHECKING:
    import torch
    from torch import nn

    from outpace.targets.hf.loading.loaded import LoadedModel

    Model = str | os.PathLike[str] | nn.Module | LoadedModel
    Dtype = str | torch.dtype
    Device = str | torch.device
else:
    Model = Dtype = Device = Any

Params = SamplingParams | Mapping[str, Any]
"""Sampling options as a call may give them."""

SET_ASIDE = (
    "correct the file generation_config.json, or set it aside with LLM(..., "
    "generation_config='none')."
)

DTYPES = ("float32", "float64", "bfloat16", "float16")
"""The numbers that a model may be computed in."""

MOST_ROWS = 1 << 16
"""The most texts that may be decoded at once: more than any machine has room for, and few enough
that a slip of the hand does no harm."""

CONVERSATIONS = 4
"""Conversations of which the target keeps what is cached, where enable_prefix_caching is unset."""


def _model(name: str, value: Any) -> Any:
    if not isinstance(value, (str, os.PathLike)):
        from torch import nn

        from outpace.targets.hf.loading.loaded import LoadedModel

        _check_kind(name, value, (nn.Module, LoadedModel), "a path, a hub name or a loaded model")
    return value


def _tokenizer(name: str, value: Any) -> Any:
    from outpace.targets.hf.loading.loaded import check_tokenizer

    check_tokenizer(value)
    return value


def _dtype(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        import torch

        _check_kind(name, value, (torch.dtype,), "a name such as 'float32' or a torch.dtype")
    elif value not in ("auto", *DTYPES):
        raise ConfigError(f"unknown {name} {shown(value)}: choose from auto, {', '.join(DTYPES)}.")
    return value


def _device(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        import torch

        _check_kind(name, value, (torch.device,), "a name such as 'cpu' or a torch.device")
    return value


def _device_map(name: str, value: Any) -> Any:
    named = isinstance(value, Mapping) and all(isinstance(part, str) for part in value)
    if value != "auto" and not (named and value):
        raise ConfigError(
            f"{name} must be 'auto', or say for each part of the model where it lies, such as "
            "{'model.embed_tokens': 0, 'model.layers': 'cpu', 'model.norm': 0, 'lm_head': 0}, not "
            f"{shown(value)}."
        )
    return value


def _progress(name: str, value: Any) -> Any:
    if not callable(value):
        raise ConfigError(f"{name} must be a function of a step and its share, not {shown(value)}.")
    return value


def _check_kind(name: str, value: Any, kinds: tuple[type, ...], what: str) -> None:
    if not isinstance(value, kinds):
        raise ConfigError(f"{name} must be {what}, not {shown(value)}.")


def _as_given(name: str, value: Any) -> Any:
    return value  # `speculation` reads it


@names_checked(UnknownArgument, "argument of LLM")
@dataclass(frozen=True)
class EngineArgs:
    """The arguments of ``LLM``; ``ConfigError`` for one that is wrong whatever the model is."""

    model: Annotated[Model | None, Reads(_model)] = None
    """Folder, GGUF file or hub name of a language model. Unset: the bundled pair.

    Also a loaded ``PreTrainedModel``, then with its ``tokenizer``: it is put into evaluation mode
    and stays in it, so call its ``train()`` before you go on training it."""
    _: KW_ONLY
    speculative_config: Annotated[
        Mapping[str, Any] | SpeculativeConfig | None, Reads(_as_given)
    ] = None
    """How to speculate (`SpeculativeConfig`). Unset: "auto", and for the bundled model the bundled
    drafter; {"method": "none"} is plain decoding."""
    tokenizer: Annotated[Any, Reads(_tokenizer)] = None
    """That of a loaded model."""
    processor: Any = None
    """That of a loaded model, for images and audio."""
    dtype: Annotated[Dtype, Reads(_dtype)] = "auto"
    """auto, float32, float64, bfloat16 or float16. auto: float32 on a CPU, the checkpoint's own on
    a GPU."""
    device: Annotated[Device, Reads(_device)] = "auto"
    """cpu, cuda or cuda:1. auto: a GPU where there is one."""
    device_map: Annotated[Literal["auto"] | Mapping[str, Any] | None, Reads(_device_map)] = None
    """For a model that one device cannot hold: auto shares its layers out over all GPUs, then the
    memory of the CPU, then the disk. Or a JSON object with the place of each part, as
    {"model.embed_tokens": 0, "model.layers": "cpu", ...} with the numbers of GPUs, "cpu" and
    "disk". Needs accelerate (docs/scale.md)."""
    tensor_parallel_size: Annotated[int, Ge(1)] = 1
    """Processes over which the weights of the model are split, each with a GPU of its own, or with
    its share of a CPU. With more than 1 they are started here, unless torchrun has started them
    (docs/scale.md)."""
    max_model_len: Annotated[int | None, Ge(2)] = None
    """Longest prompt and text together. Unset: the model's own limit."""
    max_num_seqs: Annotated[int, Ge(1), Le(MOST_ROWS)] = 16
    """Texts decoded at once."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto takes unset options from the model's own generation_config; none ignores it."""
    lora: Annotated[str | os.PathLike[str] | None, Reads(folder)] = None
    """Folder or hub name of a LoRA adapter, as peft writes it, which is merged into the model as it
    is loaded.

    The text is that of the adapted model, with speculation and without. A draft model has its own
    "lora" in ``speculative_config``."""
    trust_remote_code: bool = False
    """Run the Python files that come with the model. Only for models that you trust."""
    cpu_kernels: Literal["auto", "tune", "native", "packed", "blocked", "off"] = "auto"
    """How the linear layers of a model on a CPU are computed. auto: by faster kernels, as a fixed
    rule says for each kind of processor; tune: by those that win a race on this machine; native,
    packed, blocked: by those of one kind; off: by torch.

    With auto, tune and native, where there is a C++ compiler, whole layers are computed by our own
    code too. A model that you loaded stays as it is (docs/decisions/0005-raced-kernels.md)."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the models' passes (CPU; loading takes half a minute the first time) or record them
    as CUDA graphs (GPU). Unset: on a GPU, where it can be done.

    With True a model with which that cannot be done is refused."""
    quantization: Literal["int8", "int4"] | None = None
    """int8 or int4: quantise the model as it is loaded. Speculation is then exact with respect to
    the quantised model. Unset: not at all.

    A drafter has its own "quantization" in ``speculative_config``."""
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """auto: keys and values are cached as the model computes them; int8 or fp8: in 8 bits, each
    vector with a scale of its own, for longer contexts in the same memory. Speculation is then
    exact with respect to the model with such a cache.

    A draft model has its own "kv_cache_dtype" in ``speculative_config``
    (docs/targets/kv_cache.md)."""
    max_num_batched_tokens: Annotated[int, Ge(1)] = 2048
    """Prompt tokens that are read between two rounds, so that a long prompt does not hold up the
    texts that are being written."""
    max_batch_total_tokens: Annotated[int | None, Ge(1)] = None
    """Tokens of prompts and texts that are cached at once; before there are more, a text is
    preempted and read again later. Unset: as many as the texts can have.

    A beam search has rows of its own, and no such bound."""
    scheduling_policy: Literal["fcfs", "priority", "fair", "shortest"] = "fcfs"
    """Which request is next: fcfs (who came first), priority (the smallest number that a request
    gives), fair (the client that was given the fewest tokens) or shortest (whose text is predicted
    to end first, with ageing)."""
    enable_prefix_caching: bool | Literal["auto"] | None = None
    """Whether what is cached of ended texts serves prompts that begin alike: of up to
    ``max_num_seqs`` texts. Unset: of the last four conversations (``LLM.chat``, and
    ``keep_cached=True``), up to one context of tokens; a draft model also keeps 1,024 tokens of
    other beginnings.

    With a trained head a text with a seed of its own is read whole. "auto", as of ``outpace
    serve``: True, except for encoder-decoders."""
    batch_invariant: bool = False
    """Compute a token's logits with the same bits whatever else is in a pass, so that greedy text
    is the same with speculation and without, alone and in company. May take longer.

    What cannot be computed so is refused (docs/decisions/0015-passes-of-one-shape.md)."""
    threads: Annotated[int | None, Ge(1)] = None
    """Processor cores to compute on. Unset: torch's own number, but no more than this process has
    processors for.

    The number is torch's setting, which holds for the whole process."""
    progress: Annotated[Progress | None, Reads(_progress)] = None
    """A function that is called with each step of loading (target and drafter) and the share of all
    that is done, "ready" and 1 at the end; transformers then shows no bars of its own."""

    def __post_init__(self) -> None:
        read_options(self, ConfigError)

    def context(self, longest: int) -> int:
        """Returns the longest prompt and text together; ``ConfigError`` where the model, or all
        texts together, may not hold it. longest: what the model has positions for."""
        wanted, held = self.max_model_len, self.max_batch_total_tokens
        found = longest if wanted is None else wanted
        if wanted is not None and wanted > longest:
            raise ConfigError(
                f"max_model_len must be in [2, {longest}] for this model, not {wanted}."
            )
        if held is not None and held < found:
            raise ConfigError(
                f"max_batch_total_tokens={held} is less than one text may have ({found} tokens): "
                "raise it, or give a smaller max_model_len."
            )
        return found

    @property
    def reads_again(self) -> list[str]:
        """The arguments that were given and may have a text read again."""
        given = {
            "enable_prefix_caching": bool(self.enable_prefix_caching),
            "max_batch_total_tokens": self.max_batch_total_tokens is not None,
        }
        return [name for name, is_given in given.items() if is_given]

    @property
    def saved_texts(self) -> int:
        """How many texts the target keeps cached when they have ended."""
        if self.enable_prefix_caching is None:
            return min(CONVERSATIONS, self.max_num_seqs)
        return self.max_num_seqs if self.enable_prefix_caching else 0

    @property
    def saved_by_drafter(self) -> int | None:
        """How many a draft model or a head keeps; None for the beginnings of a few."""
        return None if self.enable_prefix_caching is None else self.saved_texts


def check_defaults(defaults: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` where the model's generation_config sets an option to nonsense.

    Without this, requests that do not set the option would be refused for a value of which their
    caller knows nothing.
    """
    try:
        SamplingParams().resolve(defaults)
    except ParamsError as error:
        reason = str(error).rstrip(".")
        raise ConfigError(
            f"the model's generation_config cannot be used ({reason}): {SET_ASIDE}"
        ) from error


def paired(sampling_params: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    """Returns the params of each of ``count`` prompts: given once for all, or one for each.

    Each may be ``SamplingParams`` or a dict of its options. Raises ``ParamsError``.
    """
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, (SamplingParams, Mapping)):
        return [_params(sampling_params)] * count
    if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, (str, bytes)):
        raise ParamsError(
            f"sampling_params must be SamplingParams, a dict, or a list of them, not "
            f"{shown(sampling_params)}."
        )
    if len(sampling_params) != count:
        raise ParamsError(
            f"{count} prompts came with {len(sampling_params)} sampling_params: give one or "
            f"{count}."
        )
    return [_params(params) for params in sampling_params]


def _params(given: Any) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given
    return SamplingParams.from_dict(given)


def beams(params: BeamSearchParams | Mapping[str, Any] | None) -> BeamSearchParams:
    """Returns the options of a beam search, given as such, as a dict, or not at all."""
    if params is None:
        return BeamSearchParams()
    if isinstance(params, BeamSearchParams):
        return params
    if not isinstance(params, Mapping):
        raise ParamsError(
            f"params of a beam search must be BeamSearchParams or a dict, not {shown(params)}."
        )
    return BeamSearchParams.from_dict(params)


def speculation(
    config: Mapping[str, Any] | SpeculativeConfig | None, bundled: Path | None
) -> SpeculativeConfig:
    """Returns how to speculate; with nothing named, by "auto" without a draft model, or with the
    bundled one by "draft_model": passes of the bundled target are so short that choosing among
    drafters takes a noticeable part of them. A trained head drafts by the method that it is of.
    bundled: where the bundled models are, for the bundled target; else None."""
    if isinstance(config, SpeculativeConfig):
        return config
    if config is None:
        config = {}
    if not isinstance(config, Mapping):
        return SpeculativeConfig.from_dict(config)
    from outpace.heads.checkpoint import find_head_kind

    head = find_head_kind(config.get("model"))
    its_method = head or "draft_model"
    if bundled is not None:
        method = config.get("method", its_method)
        drafter = bundled_drafter(method, bundled)
        if drafter is not None:
            config = {"method": method, "model": drafter, **config}
        elif head is not None:
            config = {"method": method, **config}
    return SpeculativeConfig.from_dict(config, its_method)


def bundled_drafter(method: Any, bundled: Path) -> Path | None:
    """Returns what comes with the bundled target for a method, if anything does."""
    if method in ("draft_model", "draft_tree"):
        return bundled / "drafter"
    head = bundled / "heads" / str(method)
    return head if (head / "config.json").is_file() else None


def check_ids(name: str, tokens: Iterable[int], vocabulary: int) -> None:
    """Raises ``ParamsError`` for a token id that the model cannot generate."""
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise ParamsError(
                f"{name} holds {shown(token)}: token ids are whole numbers in [0, {vocabulary})."
            ).about(name)
