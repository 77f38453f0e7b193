"""Classifiers of drafted tokens, and where their examples come from.

No person labels anything. A draft model's own tokens are put into a text, some places apart from
each other, and the target is asked what it makes of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from outpace.errors import ConfigError
from outpace.heads.classifiers import (
    AcceptancePredictionConfig,
    AcceptancePredictionHead,
    Classifier,
    Judge,
    JudgeConfig,
    find_classifier,
    save_classifier,
)
from outpace.targets.hf.loading.load import load_drafter
from outpace.targets.hf.loading.loaded import LoadedModel, check_same_vocabulary
from outpace.train.metrics import BalancedAccuracy
from outpace.train.recipe import LossOutput, Recipe, Student
from outpace.train.settings import TrainSettings, sizes_of
from outpace.train.teacher import Teacher, signature_of


class DraftedTokens:
    """A draft model, and texts with some of its tokens in them."""

    def __init__(self, draft: LoadedModel, vocabulary: int, greedy: bool) -> None:
        """vocabulary: tokens that the target can generate. greedy: its likeliest tokens are put in,
        and not some that are drawn from its distributions."""
        self.model = Teacher(draft, (-1,), top=0)
        self._vocabulary, self._greedy = vocabulary, greedy

    def probs(self, states: Tensor) -> Tensor:
        """Returns its distributions ``[..., V']`` over tokens of the target, from its last
        states."""
        return self.model.logits(states)[..., : self._vocabulary].softmax(-1)

    def insert_into(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Returns texts ``[B, T]`` with tokens of its own at places ``[P]``, each chosen after the
        text as it was given."""
        lacking = tokens[tokens >= self.model.vocabulary]
        if len(lacking):
            raise ConfigError(
                f"the text has token {int(lacking[0])}, and the draft model only "
                f"{self.model.vocabulary} tokens: leave out texts with tokens that it lacks, such "
                "as placeholders of images, or name a draft model with all of them."
            )
        probs = self.probs(self.model.read(tokens).hidden_states[:, places - 1])  # [B, P, V']
        if self._greedy:
            own = probs.argmax(-1)
        else:
            own = torch.multinomial(probs.flatten(0, 1), 1).view(probs.shape[:2])
        changed = tokens.clone()
        changed[:, places] = own
        return changed


class ClassifierStudent(Student):
    """A classifier, the draft model whose tokens it learns from, and what the target says."""

    network: Classifier
    drafts = False

    def recipe(self, teacher: Teacher) -> Recipe:
        return ClassifierRecipe(self.network)

    def save(self, out: Path) -> None:
        save_classifier(self.network, out)

    @abstractmethod
    def read(self, teacher: Teacher, tokens: Tensor) -> Examples:
        """Returns the examples that blocks of text ``[B, T]`` bring."""


class JudgeStudent(ClassifierStudent):
    """The judge. A drafted token counts as right if the target, at the next few places of the text,
    says the same after it as it says after the text's own token."""

    top = 1
    metric = BalancedAccuracy(("right", "wrong"))

    def __init__(self, loaded: LoadedModel, draft: LoadedModel, config: JudgeConfig) -> None:
        self.network = Judge(signature_of(loaded), config).to(loaded.device)
        self._drafted = DraftedTokens(draft, loaded.vocabulary, config.greedy)
        self._window = config.window
        self.depths = 2 * config.window

    def read(self, teacher: Teacher, tokens: Tensor) -> Examples:
        own = teacher.read(tokens)
        tokens, window = own.tokens, self._window
        places = torch.arange(window, tokens.shape[1] - window, 2 * window, device=tokens.device)
        changed = self._drafted.insert_into(tokens, places)
        theirs = teacher.read(changed)
        same = (own.top_tokens == theirs.top_tokens)[..., 0]  # [B, T]
        agreed = torch.stack([same[:, places + step] for step in range(window)]).all(0)
        # Where it is the text's own token, only drafted ones before it can make a difference.
        right = (agreed | (changed == tokens)[:, places]).flatten().float()
        count, others = float(right.sum()), float((1 - right).sum())
        if not (count and others):  # of one kind there is nothing to balance
            count = others = right.numel() / 2
        states = theirs.hidden_states[:, places].flatten(0, 1)
        return Examples(states, right, 0.5 / count, 0.5 / others)


class AcceptancePredictionStudent(ClassifierStudent):
    """The acceptance prediction head. How right a drafted token is, is the chance that the target
    accepts it, in the text in which the draft model's state at it is taken."""

    top = 0
    metric = BalancedAccuracy(("accepted", "rejected"))

    def __init__(
        self, loaded: LoadedModel, draft: LoadedModel, config: AcceptancePredictionConfig
    ) -> None:
        self.network = AcceptancePredictionHead(signature_of(draft), config).to(loaded.device)
        self._drafted = DraftedTokens(draft, loaded.vocabulary, config.greedy)
        self._config = config
        self.depths = config.every

    def read(self, teacher: Teacher, tokens: Tensor) -> Examples:
        every = self._config.every
        places = torch.arange(every, tokens.shape[1], every, device=teacher.device)
        changed = self._drafted.insert_into(tokens.to(teacher.device), places)
        states = self._drafted.model.read(changed).hidden_states
        target = teacher.logits(teacher.read(changed).hidden_states[:, places - 1])  # [B, P, V]
        token = changed[:, places, None]
        if self._config.greedy:
            right = (target.argmax(-1, keepdim=True) == token).float()
        else:
            p = target.softmax(-1).gather(-1, token)
            q = self._drafted.probs(states[:, places - 1]).gather(-1, token)
            right = (p / q.clamp_min(torch.finfo(q.dtype).tiny)).clamp_max(1)
        each = 1 / right.numel()
        states = states[:, places].flatten(0, 1)
        weight = self._config.rejection_weight
        return Examples(states, right.flatten(), each, weight * each)


STUDENTS: Mapping[str, Callable[[LoadedModel, LoadedModel, Any], ClassifierStudent]] = {
    "judge": JudgeStudent,
    "stop_head": AcceptancePredictionStudent,
}
"""Who learns, by the name of the classifier."""


def classifier_student(loaded: LoadedModel, settings: TrainSettings) -> ClassifierStudent:
    """Returns the classifier that the settings ask for; loads its draft model."""
    draft = load_drafter(settings.draft, loaded)
    check_same_vocabulary(loaded, draft)
    config = sizes_of(find_classifier(settings.method).Config, settings.head)
    try:
        return STUDENTS[settings.method](loaded, draft, config)
    except ValueError as error:
        raise ConfigError(f"no {settings.method} of these sizes can be made: {error}.") from error


@dataclass(frozen=True, eq=False)
class Examples:
    """P drafted tokens, and how right each of them is."""

    hidden_states: Tensor  # [P, H], the last hidden states at them
    right: Tensor  # [P] in [0, 1]
    if_right: float
    """How much a token that is right counts."""
    if_wrong: float


class ClassifierRecipe(Recipe):
    """The loss of a classifier on drafted tokens."""

    def __init__(self, network: Classifier) -> None:
        self._network = network

    def compute_loss(self, batch: Examples) -> LossOutput:
        odds = self._network(batch.hidden_states.float())  # [P]
        right = batch.right
        gained = batch.if_right * right * logsigmoid(odds)
        lost = batch.if_wrong * (1 - right) * logsigmoid(-odds)
        # Weights move all odds: a token is called right where they are above those of the mean one.
        usual = batch.if_right * right.sum() / (batch.if_wrong * (1 - right).sum())
        if not 0 < usual < torch.inf:  # all are of one kind: the threshold is that of half of each
            usual = right.new_tensor(batch.if_right / batch.if_wrong)
        return LossOutput(-(gained + lost).sum(), _recognised(odds > usual.log(), right > 0.5))


def _recognised(said: Tensor, right: Tensor) -> Tensor:
    """``[P, 2]``: 1 where a token is recognised and 0 where it is not. A token that is right has
    that in the first column and NaN in the second; one that is wrong, the other way round."""
    same = (said == right).double()
    columns = [same.where(kind, torch.nan) for kind in (right, ~right)]
    return torch.stack(columns, -1)
