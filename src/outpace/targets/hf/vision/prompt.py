"""A prompt with images as embeddings, positions and masks, which is read in pieces.

A vision-language model turns images into embeddings, puts them in the place of placeholder tokens,
and works out the positions and masks that belong to them. All of this it does itself, in one pass
over the prompt that is stopped where its language model would begin. What the language model would
have been given is then fed to it piece by piece, over our slots, and in as many passes as it takes.
So nothing here knows one family from another.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import PromptError, UnsupportedModel, reason_of
from outpace.targets.hf.attention import to_attention_mask
from outpace.targets.hf.cache import CACHE_ARGUMENTS
from outpace.targets.hf.kinds import placeholders
from outpace.targets.hf.lock import model_lock
from outpace.targets.hf.logits import PassOutput
from outpace.targets.hf.plain import is_causal_by_default

_OURS = frozenset({"input_ids", *CACHE_ARGUMENTS, "use_cache", "labels"})
"""Arguments of a language model that say nothing of the prompt, or that each pass over slots sets
anew."""

Seen = Tensor | Mapping[str, Tensor]
"""Which tokens see which, ``[T, T]`` booleans; where layers differ, by the type of layer."""


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """What the language model inside a vision-language model is given for T tokens."""

    decoder: nn.Module
    embeddings: Tensor  # [1, T, H]
    positions: Tensor | None  # [..., 1, T]; None: they count from 0
    seen: Seen | None
    """Only where some token sees a later one; None: each sees those before it."""
    cuts: Sequence[int] | None
    """The lengths, ascending, at which a piece may end: nothing before sees anything after. None:
    any."""
    more: Mapping[str, Any]
    """Further arguments."""
    implementation: str
    """The name of the model's attention in transformers, which says what its masks look like."""

    @classmethod
    def of(cls, model: Any, length: int, given: Mapping[str, Any]) -> ImagePrompt:
        """Returns the prompt of ``length`` tokens that a model's language model was given."""
        named = {"inputs_embeds", "position_ids", "attention_mask"}
        more = {name: given[name] for name in given.keys() - named - _OURS}
        embeddings: Any = given.get("inputs_embeds")
        _check(type(model).__name__, embeddings, more, length)
        mask = given.get("attention_mask")
        if mask is None and not is_causal_by_default(model):
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=model.device)
        seen = _looking_ahead(mask, length, model.device)
        return cls(
            decoder=model.get_decoder(),
            embeddings=embeddings,
            positions=given.get("position_ids"),
            seen=seen,
            cuts=None if seen is None else _cuts(seen),
            more=more,
            implementation=model.config.get_text_config()._attn_implementation,
        )

    def __len__(self) -> int:
        return self.embeddings.shape[1]

    @property
    def offset(self) -> int:
        """How much further the positions of the text after it are than its tokens: images of some
        families take fewer positions than placeholders."""
        if self.positions is None:
            return 0
        return int(self.positions[..., -1].max()) - (len(self) - 1)

    def end(self, begin: int, size: int, needed: int) -> int:
        """Returns where a piece from ``begin`` on ends that has at most ``size`` tokens, or more
        where they cannot be parted. needed: the tokens that have to be read in all; more are read
        where these see them."""
        last = self._at_least(needed)
        if self.cuts is None:
            return min(begin + size, last)
        fitting = bisect_right(self.cuts, min(begin + size, last))
        cut = self.cuts[fitting - 1] if fitting else 0
        return cut if cut > begin else self._at_least(begin + 1)

    def _at_least(self, length: int) -> int:
        """The first length, from this one on, at which a piece may end."""
        length = min(length, len(self))
        return length if self.cuts is None else self.cuts[bisect_left(self.cuts, length)]

    def piece(self, begin: int, end: int) -> Piece:
        """Returns what stands for the model in a pass over some of the tokens."""
        return Piece(self, begin, end)


class Piece:
    """Some tokens of a prompt with images, in the place of a model in a pass that reads them."""

    def __init__(self, prompt: ImagePrompt, begin: int, end: int) -> None:
        self._prompt, self._begin, self._end = prompt, begin, end

    def __call__(self, **options: Any) -> PassOutput:
        """Takes what the model does; tokens, positions and masks are the prompt's own."""
        prompt, part = self._prompt, slice(self._begin, self._end)
        keep = options.pop("logits_to_keep")
        options.pop("input_ids")
        if prompt.positions is not None:
            options["position_ids"] = prompt.positions[..., part]
        if prompt.seen is not None:
            options["attention_mask"] = self._mask(prompt.seen)
        embeddings = prompt.embeddings[:, part]
        more = {name: self._cut(name, value) for name, value in prompt.more.items()}
        output: Any = prompt.decoder(inputs_embeds=embeddings, **{**more, **options})
        return PassOutput(embeddings.new_empty(1, keep, 0), getattr(output, "hidden_states", None))

    def _mask(self, seen: Seen) -> Any:
        if isinstance(seen, Mapping):
            return {kind: self._mask(own) for kind, own in seen.items()}
        prompt = self._prompt
        part = seen[None, self._begin : self._end, : self._end]
        return to_attention_mask(part, prompt.implementation, prompt.embeddings.dtype)

    def _cut(self, name: str, value: Any) -> Any:
        """The part of a further argument that belongs to these tokens."""
        if name == "deepstack_visual_embeds" and value is not None:
            shown = self._prompt.more["visual_pos_masks"][0]
            first = int(shown[: self._begin].sum())
            last = first + int(shown[self._begin : self._end].sum())
            return [features[first:last] for features in value]
        return value[:, self._begin : self._end] if isinstance(value, Tensor) else value


def _check(name: str, embeddings: Tensor | None, more: Mapping[str, Any], length: int) -> None:
    """Raises ``UnsupportedModel`` for arguments of which nothing says how they are cut."""
    if embeddings is None or embeddings.shape[:2] != (1, length):
        raise UnsupportedModel(
            f"{name} does not put its images in the place of tokens of the prompt: give prompts "
            "without images, or use another model."
        )
    for argument, value in more.items():
        plain = value is None or isinstance(value, (bool, int, float, str))
        by_token = isinstance(value, Tensor) and value.shape[:2] == (1, length)
        if not (plain or by_token or argument == "deepstack_visual_embeds"):
            raise UnsupportedModel(
                f"{name} gives its language model {argument!r}, which outpace cannot feed piece by "
                "piece: give prompts without images, or use another model."
            )


def _looking_ahead(mask: Any, length: int, device: torch.device) -> Seen | None:
    """Returns which tokens see which where some see later ones; None where none does, as in plain
    text."""
    masks = mask if isinstance(mask, Mapping) else {"": mask}
    given = {kind: own for kind, own in masks.items() if own is not None}
    if not any(bool(_as_seen(own).triu(1).any()) for own in given.values()):
        return None
    if not isinstance(mask, Mapping):
        return _as_seen(mask)
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return {kind: _as_seen(given[kind]) if kind in given else causal for kind in masks}


def _as_seen(mask: Tensor) -> Tensor:
    """Returns ``[T, T]`` booleans for a mask ``[1, 1, T, T]`` as attention functions take it."""
    return mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] >= 0


def _cuts(seen: Seen) -> list[int]:
    """Returns the lengths at which nothing before sees anything after."""
    masks = list(seen.values()) if isinstance(seen, Mapping) else [seen]
    last = masks[0].shape[0] - 1
    farthest = torch.stack([last - mask.flip(1).byte().argmax(1) for mask in masks]).amax(0)
    return [at + 1 for at, far in enumerate(farthest.cummax(0).values.tolist()) if far <= at]


# -- what a model makes of a prompt ----------------------------------------------------------------


@torch.inference_mode()
def read_prompt(
    model: nn.Module, token_ids: Sequence[int], media: Mapping[str, Any]
) -> ImagePrompt:
    """Returns what the language model of ``model`` is given for a prompt with images.

    token_ids: with as many placeholders as the images need. media: what the processor made of the
    images, by the names of the model's arguments. Raises ``PromptError`` where the two do not fit
    together, and ``UnsupportedModel`` for a model that gives its language model more than that.
    """
    loaded: Any = model
    if token_ids[-1] in placeholders(loaded.config):
        raise PromptError("the prompt ends with an image: put some text after it.")
    ids = torch.tensor([list(token_ids)], device=loaded.device)
    try:
        with _restored_rope_deltas(loaded):
            given = _given_to_decoder(loaded, input_ids=ids, **on_device(loaded, media))
    except (torch.OutOfMemoryError, UnsupportedModel):
        raise
    except Exception as error:  # of the model's own code, over inputs that are not as it expects
        raise PromptError(
            f"{type(model).__name__} cannot read the images of this prompt ({reason_of(error)}): "
            "give text and images through its processor."
        ) from error
    return ImagePrompt.of(loaded, len(token_ids), given)


@torch.inference_mode()
def text_offset(model: nn.Module) -> int:
    """Returns the position of a text's first token: 1 for PaliGemma, 0 for all others."""
    loaded: Any = model
    if not placeholders(loaded.config):
        return 0
    ids = torch.zeros(1, 1, dtype=torch.long, device=loaded.device)
    with _restored_rope_deltas(loaded):
        positions = _given_to_decoder(loaded, input_ids=ids).get("position_ids")
    return 0 if positions is None else int(positions.max())


class _Reached(Exception):
    """The pass has come to the language model."""


def _given_to_decoder(model: Any, **inputs: Any) -> dict[str, Any]:
    """Returns the arguments that a model's forward calls its language model with."""
    given: dict[str, Any] = {}

    def note(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if args:
            raise UnsupportedModel(
                f"{type(model).__name__} hands its language model arguments without names: images "
                "cannot be read for it."
            )
        given.update(options)
        raise _Reached

    hook = model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    try:
        model(use_cache=False, **inputs)
    except _Reached:
        return given
    finally:
        hook.remove()
    raise UnsupportedModel(
        f"{type(model).__name__} does not keep its language model in one part: images cannot be "
        "read for it."
    )


@contextmanager
def _restored_rope_deltas(model: nn.Module) -> Iterator[None]:
    """Gives a model back what it remembers of the last prompt that it was given by others. Nobody
    else computes with it meanwhile."""
    holders: list[Any] = [part for part in model.modules() if hasattr(part, "rope_deltas")]
    with model_lock(model):
        before = [holder.rope_deltas for holder in holders]
        try:
            yield
        finally:
            for holder, deltas in zip(holders, before, strict=True):
                holder.rope_deltas = deltas


def on_device(model: nn.Module, media: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a processor made of images as tensors where the model is."""
    return {name: _moved(value, model) for name, value in media.items()}


def _moved(value: Any, model: Any) -> Any:
    """Puts what a processor made where the model is; pixels become numbers of its kind."""
    if isinstance(value, Tensor):
        return value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)
    if isinstance(value, (list, tuple)):
        return [_moved(item, model) for item in value]
    return value
