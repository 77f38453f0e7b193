"""A small classifier of prompts: hashed letter n-grams and logistic regression.

It is kept as plain arrays (``*.npz`` without pickles), so that loading one runs no code of others.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from outpace.core.extras import extra
from outpace.errors import ConfigError
from outpace.files import replacing

FEATURES = 1 << 14
"""Numbers that n-grams are hashed to."""

LENGTHS = (1, 4)
"""Letters of the shortest and the longest n-gram, within words."""

LETTERS = 4000
"""Letters that are read at most from a prompt's beginning, and from its end."""

FORMAT = "outpace task router 1"

DAMAGED = (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error)
"""What numpy raises for a file that it did not write, or that is cut off."""

FOLDS = 5
"""Folds of the cross-validation."""


@dataclass(frozen=True, eq=False)
class TaskClassifier:
    """Which of some tasks a prompt belongs to, and how probably.

    >>> few = TaskClassifier.trained({"sum": ["1 + 2", "3 + 4"], "word": ["a tree", "the sea"]})
    >>> few.task_of("5 + 6")[0]
    'sum'
    """

    tasks: tuple[str, ...]
    weights: Any  # [tasks, FEATURES]
    biases: Any  # [tasks]
    temperature: float = 1.0
    """What scores are divided by, so that probabilities are calibrated."""
    accuracy: float | None = None
    """The share of unseen examples that it classified rightly in cross-validation."""

    def task_of(self, text: str) -> tuple[str, float]:
        """Returns the most probable task of a prompt, and its probability."""
        chances = self.chances(text)
        best = int(chances.argmax())
        return self.tasks[best], float(chances[best])

    def chances(self, text: str) -> Any:
        """Returns ``[tasks]``: the probability of each."""
        scores = (_features([text]) @ self.weights.T + self.biases)[0] / self.temperature
        shifted = np.exp(scores - scores.max())
        return shifted / shifted.sum()

    # -- training ------------------------------------------------------------------------------

    @classmethod
    def trained(cls, texts: Mapping[str, Sequence[str]], seed: int = 0) -> TaskClassifier:
        """Returns a classifier fitted to example prompts of each task, and calibrated by
        cross-validation; ``ConfigError`` if there are too few."""
        tasks = tuple(texts)
        short = [task for task in tasks if len(texts[task]) < 2]
        if len(tasks) < 2 or short:
            of = f", and {short[0]!r} has {len(texts[short[0]])}" if short else ""
            raise ConfigError(f"a router needs two tasks or more, and two prompts of each{of}.")
        seed %= 1 << 32  # more scikit-learn does not take
        examples = [text for each in texts.values() for text in each]
        labels = np.array([n for n, task in enumerate(tasks) for _ in texts[task]])
        features = _features(examples)
        weights, biases = _fit(features, labels, len(tasks), seed)
        folds = min(FOLDS, *map(len, texts.values()))
        scores = _unseen_scores(features, labels, len(tasks), folds, seed)
        accuracy = float((scores.argmax(1) == labels).mean())
        return cls(tasks, weights, biases, _temperature(scores, labels), accuracy)

    @staticmethod
    def check_packages() -> None:
        """Raises ``ConfigError`` where a package is missing that classifying needs."""
        _sklearn("feature_extraction.text")

    # -- files ---------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file that `load` reads."""
        # savez would add a suffix to a name.
        with replacing(Path(path)) as part, part.open("wb") as file:
            np.savez_compressed(
                file,
                format=np.array(FORMAT),
                tasks=np.array(self.tasks),
                weights=self.weights.astype(np.float32),
                biases=self.biases.astype(np.float32),
                numbers=np.array([self.temperature, self.accuracy or float("nan")]),
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TaskClassifier:
        """Returns the classifier in a file; ``ConfigError`` if it holds none."""
        try:
            # numpy leaves a file open that it has opened itself and that is damaged.
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as found:
                if str(found["format"]) != FORMAT:
                    raise ConfigError(f"{path} is a router of another version: train it anew.")
                temperature, accuracy = found["numbers"].tolist()
                tasks = tuple(map(str, found["tasks"]))
                return cls(tasks, found["weights"], found["biases"], temperature, accuracy)
        except FileNotFoundError as error:
            raise ConfigError(
                f"there is no router {str(path)!r}: make one with `outpace tune router`."
            ) from error
        except DAMAGED as error:
            raise ConfigError(
                f"{path} is no router: make one with `outpace tune router`."
            ) from error


def _features(texts: Sequence[str]) -> Any:
    """``[texts, FEATURES]``, sparse: hashed n-grams, each text of length 1."""
    vectorizer = _sklearn("feature_extraction.text").HashingVectorizer(
        analyzer="char_wb", ngram_range=LENGTHS, n_features=FEATURES, lowercase=False
    )
    ends = [t if len(t) <= 2 * LETTERS else f"{t[:LETTERS]} {t[-LETTERS:]}" for t in texts]
    return vectorizer.transform(ends)


def _fit(features: Any, labels: Any, tasks: int, seed: int) -> tuple[Any, Any]:
    logistic = _sklearn("linear_model").LogisticRegression
    model = logistic(C=30.0, max_iter=1000, class_weight="balanced", random_state=seed)
    model.fit(features, labels)
    weights, biases = model.coef_, model.intercept_
    if tasks == 2:  # the scores of the second task, and none for the first
        weights, biases = np.vstack([0 * weights, weights]), np.concatenate([0 * biases, biases])
    return weights, biases


def _unseen_scores(features: Any, labels: Any, tasks: int, folds: int, seed: int) -> Any:
    """``[examples, tasks]``: the scores of each example by a fit to the others."""
    scores = np.zeros((len(labels), tasks))
    splits = _sklearn("model_selection").StratifiedKFold(folds, shuffle=True, random_state=seed)
    for fitted, unseen in splits.split(features, labels):
        weights, biases = _fit(features[fitted], labels[fitted], tasks, seed)
        scores[unseen] = features[unseen] @ weights.T + biases
    return scores


def _temperature(scores: Any, labels: Any) -> float:
    """What to divide scores by so that unseen examples are most probable (Guo et al. 2017). It is
    never less than 1: rightly classified examples do not make strange prompts certain."""
    candidates = np.geomspace(1, 20, 41)

    def loss(temperature: float) -> float:
        scaled = scores / temperature
        top = scaled.max(1, keepdims=True)
        total = np.log(np.exp(scaled - top).sum(1)) + top[:, 0]
        return float((total - scaled[np.arange(len(labels)), labels]).mean())

    return float(min(candidates, key=loss))


def _sklearn(module: str) -> Any:
    return extra(f"sklearn.{module}", "a router of tasks", "outpace[tune]", "scikit-learn")
