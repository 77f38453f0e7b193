"""The students of online learning: a head or a draft model, with the recipe that trains it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from outpace.draft.base import Setup
from outpace.errors import ConfigError
from outpace.heads.base import Head
from outpace.heads.checkpoint import save_head
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.parallel.load import SplitModel
from outpace.train.distill import LikeliestRecipe
from outpace.train.draft_model import StartModel
from outpace.train.recipe import Recipe
from outpace.train.teacher import Teacher

Network = TypeVar("Network", bound=nn.Module)


class OnlineStudent(ABC):
    """A network that learns from the target in float32, and the one that drafts with its
    weights."""

    network: nn.Module
    recipe: Recipe
    depths: int
    """Tokens that a window has to have at least, less one."""

    def __init__(self, drafting: nn.Module) -> None:
        self._drafting = drafting

    @torch.no_grad()
    def serve(self) -> None:
        """Lets what drafts have what was learned."""
        if self._drafting is not self.network:
            pairs = zip(self._drafting.parameters(), self.network.parameters(), strict=True)
            for used, learned in pairs:
                used.copy_(learned)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that are there for learning only."""
        if self._drafting is self.network:
            return 0
        return sum(weight.nbytes for weight in self.network.parameters())

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes what was learned, as ``--draft`` takes it."""


class OnlineHead(OnlineStudent):
    """A head over the target's states."""

    def __init__(self, head: Head, setup: Setup) -> None:
        """head: the one that drafts."""
        super().__init__(head)
        if isinstance(setup.loaded, SplitModel):
            raise ConfigError(
                f"{setup.loaded.name} is split over several processes, through which no gradients "
                "go: leave 'online' or tensor_parallel_size out."
            )
        self.network = self._head = in_float32(head)
        self._head.unfreeze()
        self.recipe = self._head.recipe()(self._head, Teacher(setup.loaded, head.hidden_layers))
        self.depths = head.config.depths

    def save(self, folder: Path) -> None:
        save_head(self._head, folder)


class OnlineModel(OnlineStudent):
    """A draft model with the target's tokens."""

    depths = 1

    def __init__(self, drafter: LoadedModel, setup: Setup) -> None:
        super().__init__(drafter.model)
        self.network = in_float32(drafter.model).requires_grad_(True)
        self.recipe = LikeliestRecipe(self.network, int(drafter.config.vocab_size))
        self._tokenizer = drafter.tokenizer or setup.loaded.tokenizer

    def save(self, folder: Path) -> None:
        StartModel(self.network, self._tokenizer).save(folder)


def in_float32(network: Network) -> Network:
    """Returns a network in float32: the same one where it is."""
    same = all(weight.dtype == torch.float32 for weight in network.parameters())
    found: Any = network if same else copy.deepcopy(network).float()
    return found.eval()  # type: ignore[no-any-return]
