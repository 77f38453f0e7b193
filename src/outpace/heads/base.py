"""The base class of trained heads, their configuration, and the parts that they share.

A head looks at the target's hidden states and guesses the tokens after the root, the last
committed token, one depth after the other. A `StepHead` (`methods.heads.steps`) goes on from one
state, the one from which the target drew the root. A `DecoderHead` (`methods.heads.decoder_heads`)
attends over the whole text. The same step of a head is used for drafting, where the W columns are
the nodes of a level of the draft tree, and for training, where they are all places of a text at
once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class SharedModules(Protocol):
    """The parts of a target that a head may use as they are."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings ``[..., H]`` of tokens ``[...]``."""

    @property
    def embedding_scale(self) -> float:
        """By what `embed` multiplies the rows of the target's table, as Gemma's does."""

    def compute_logits(self, states: Tensor) -> Tensor:
        """Returns the logits ``[..., V]`` of last hidden states ``[..., H]``."""

    def apply_soft_cap(self, logits: Tensor) -> Tensor:
        """Returns logits ``[..., V']`` that a copy of some rows of the output matrix has made, with
        the soft bound of those that `compute_logits` makes."""


@dataclass(frozen=True)
class TargetShape:
    """What of a target a head depends on; 0 where a file does not say it."""

    hidden_size: int
    vocab_size: int
    layers: int
    name: str = ""

    @classmethod
    def of(cls, config: Any, name: str = "") -> TargetShape:
        """Returns the shape of the model that a text model's configuration describes. name: what
        errors call the model."""
        return cls(config.hidden_size, config.vocab_size, config.num_hidden_layers, name)


Sizes = TypeVar("Sizes", bound="DataclassInstance")
"""The sizes that something is built with: a dataclass with a default for each of them."""


COUNTS = ("depths", "layers", "blocks", "passes", "unrolled")
"""Sizes that say how many there are of something."""

MAX_COUNT = 1000
"""What each of them is at most."""

MAX_SIZE = 1 << 24
"""The greatest width or vocabulary of a target."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What a head is built from; each kind adds its own sizes."""

    depths: int = 4
    """Tokens after the root that it guesses."""
    draft_vocab_size: int = 0
    """Tokens that it can guess, those that its training text has most often; 0: all."""

    def __post_init__(self) -> None:
        if self.depths < 1:
            raise ValueError(f"depths is {self.depths}")
        for name in COUNTS:  # each costs matrices of its own: a file must not ask for all memory
            if (count := getattr(self, name, 0)) > MAX_COUNT:
                raise ValueError(f"{name} is {count}, and {MAX_COUNT} are the most")


class Head(nn.Module, ABC):
    """Guesses the tokens after the root, depth by depth."""

    kind: ClassVar[str]
    """Its name, which is the method's."""
    Config: ClassVar[type[HeadConfig]]
    learns_online: ClassVar[bool] = True
    """Whether it learns at single places of a text, as the target corrects them."""

    def __init__(self, target: TargetShape, config: HeadConfig) -> None:
        super().__init__()
        self.target = target
        self.config = config
        size = config.draft_vocab_size or target.vocab_size
        self.register_buffer("d2t", torch.arange(size))

    d2t: Tensor
    """``[V']``: the target's token for each of the head's own."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = [
            (module, name, value)
            for module in self.modules()
            for name, value in module.named_buffers(recurse=False)
            if name.endswith("inv_freq")
        ]
        found = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for module, name, value in kept:  # in float32 whatever the weights are, as in transformers
            setattr(module, name, value.to(getattr(module, name).device))
        return found

    @classmethod
    @abstractmethod
    def recipe(cls) -> Any:
        """Returns the class that trains it (`outpace.train.recipe.Recipe`)."""

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        """Its layers whose keys and values of a text are kept (`AttentionContext.through`); none
        where it does more with them, so that torch has to compute them."""
        return ()

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's layers that it reads, as in `Needs.hidden_layers`."""
        return (-1,)

    @property
    def vocabulary(self) -> int:
        """Tokens that it can guess, V'."""
        return len(self.d2t)

    @property
    def num_parallel_depths(self) -> int:
        """Depths that it guesses while each of its weights is read once: more than one where each
        depth has weights of its own, or where one pass makes them all."""
        return 1

    @property
    def shares_lm_head(self) -> bool:
        """Whether the target's output matrix makes its logits."""
        return False

    def target_to_draft(self) -> Tensor:
        """Returns the head's own number of each of the target's tokens, ``[V]``; -1 for a token
        that it cannot guess."""
        own = self.d2t.new_full((self.target.vocab_size,), -1)
        own[self.d2t] = torch.arange(self.vocabulary, device=own.device)
        return own

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it computes in, which is its weights' unless these are rounded to
        integers."""
        held = chain(self.parameters(), self.buffers())
        return next(tensor.dtype for tensor in held if tensor.is_floating_point())

    @torch.no_grad()
    def init_from_lm_head(self, shared_head: Tensor | None) -> None:
        """Starts training from what the target knows, where that helps.

        shared_head: the target's output matrix ``[V', H]`` for the head's own tokens, if there is
        one.
        """

    def init_from_embeddings(self, shared: SharedModules) -> None:
        """Starts training from the target's embeddings, where that helps."""

    @classmethod
    def can_load_from(cls, path: str) -> bool:
        """Returns whether a path leads to a model that may bring a head of this kind."""
        return False

    @classmethod
    def load_from_target(cls, loaded: Any, path: str) -> Head:
        """Returns the head that a target brings, to learn from there, where it `can_load_from` a
        path; ``ConfigError`` where it cannot learn."""
        raise NotImplementedError

    def unfreeze(self) -> None:
        """Has gradients kept for all weights that learn, of a head that has learned before."""
        self.requires_grad_(True)


class ResidualBlock(nn.Module):
    """``x + SiLU(W x)``, which begins as the identity; with another width after it than before
    it, ``V x + SiLU(W x)``, which begins as the linear map V."""

    def __init__(self, inputs: int, outputs: int | None = None, bias: bool = False) -> None:
        """bias: whether V has one, too."""
        super().__init__()
        self.linear = nn.Linear(inputs, outputs or inputs)
        self.narrow = nn.Linear(inputs, outputs, bias=bias) if outputs else nn.Identity()
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: ``[..., inputs]`` -> ``[..., outputs]``."""
        found: Tensor = self.narrow(x) + nn.functional.silu(self.linear(x))
        return found


def parse_target_shape(given: Mapping[str, Any]) -> TargetShape:
    """Returns a target's shape from the entries of a file; raises ``TypeError`` or ``ValueError``
    where they do not fit."""
    shape = TargetShape(**given)
    for name in ("hidden_size", "vocab_size", "layers"):
        size = getattr(shape, name)
        if type(size) is not int or not 0 <= size <= MAX_SIZE:
            raise ValueError(f"the target's {name} is {size!r}")
    return shape


def parse_config(kind: type[Sizes], given: Mapping[str, Any]) -> Sizes:
    """Returns a configuration from the entries of a file; raises ``TypeError`` or ``ValueError``
    where they do not fit. A whole number may stand where a float is wanted."""
    defaults, entries = asdict(kind()), dict(given)
    for name in defaults.keys() & entries.keys():
        value, default = entries[name], defaults[name]
        if type(value) is int and type(default) is float:
            value = entries[name] = float(value)
        number = isinstance(value, (int, float))
        if type(value) is not type(default) or (number and not 0 <= value < math.inf):
            raise ValueError(f"{name} is {given[name]!r}")
    return kind(**entries)


# -- heads whose logits the target's output matrix makes -------------------------------------------

# What heads have in common that guess states of the target, of which its own output matrix makes
# logits.


class SharedLMHeadMixin(Head):
    """A head whose logits the target's output matrix makes. A head that knows few tokens only has
    a copy of their rows, ``lm_head``, which has the scale of the logits in it and does not learn.
    """

    lm_head: nn.Linear | None

    def new_draft_lm_head(self) -> nn.Linear | None:
        """Returns room for the rows of the few tokens that it knows; None where it knows all."""
        few = bool(self.config.draft_vocab_size)
        return nn.Linear(self.target.hidden_size, self.vocabulary, bias=False) if few else None

    @property
    def shares_lm_head(self) -> bool:
        return self.lm_head is None

    def compute_logits(self, states: Tensor, shared: SharedModules) -> Tensor:
        """Returns the logits ``[..., V']`` of guessed states ``[..., H]``."""
        return (
            shared.compute_logits(states)
            if self.lm_head is None
            else shared.apply_soft_cap(self.lm_head(states))
        )

    @torch.no_grad()
    def init_from_lm_head(self, shared_head: Tensor | None) -> None:
        if self.lm_head is not None and shared_head is not None:
            self.lm_head.weight.copy_(shared_head)
            self.lm_head.requires_grad_(False)

    def unfreeze(self) -> None:
        super().unfreeze()
        if self.lm_head is not None:
            self.lm_head.requires_grad_(False)


@torch.no_grad()
def init_identity_on_last(linear: nn.Module) -> None:
    """Has a map of several joined states begin as the identity on the last of them."""
    weight = linear.get_parameter("weight")
    weight.zero_()
    weight[:, -len(weight) :].copy_(torch.eye(len(weight)))
