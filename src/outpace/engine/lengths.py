"""Predictions of how many tokens a text will have."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np

from outpace.engine.request import EngineRequest

Indices = np.ndarray[Any, np.dtype[np.int64]]
Values = np.ndarray[Any, np.dtype[np.float64]]

BUCKETS = 4096
"""Weights of the learned estimate; words share one where their hashes meet."""

LOOKED_AT = 32
"""Tokens at both ends of a prompt that the learned estimate looks at."""

NOISE = 0.25
"""Variance of the logarithm of a length, given everything that is looked at."""

FORGETTING = 1e-4
"""Variance that each weight gains when it is used, so that it goes on learning."""

ENOUGH = 16
"""Ended texts from which the learned estimate may be preferred."""

MEMORY = 0.98
"""Weight of the past in the errors by which the two estimates are compared."""

CLASSES = 256
"""Kinds of requests of which the fallback remembers the usual length."""

HASH = 0x9E3779B1


class LengthEstimator:
    """Predicts the lengths of texts, and learns from each one that ends.

    Two estimates, both of the median of a length's logarithm: a *learned* one, linear in the words
    at both ends of the prompt, its length and the request's options; and a *fallback*, the usual
    length of texts with about the same limit. Each is moved by a step after every text so that half
    of them turn out longer (it is calibrated), and its errors are remembered: the learned one
    counts as long as its errors are the smaller ones.

    A text that ended for another reason than its own, such as its limit or a client that left, says
    only that it would have been at least that long.
    """

    def __init__(self) -> None:
        self._learned = _Linear()
        self._usual = _Usual()
        self._errors = [_Error(), _Error()]
        self._texts = 0

    def predict(self, request: EngineRequest) -> float:
        """Returns the predicted tokens of a text, from 1 to its limit."""
        least = max(1, request.params.min_tokens or 0)
        if _never_ends_by_itself(request):
            return float(request.max_tokens)
        learned, usual = self._estimates(request)
        estimate = min(learned if self._trusts() else usual, math.log(request.max_tokens))
        return min(max(math.exp(estimate), least), request.max_tokens)

    def learn(self, request: EngineRequest) -> None:
        """Learns from a text that has ended."""
        if not request.output_ids or _never_ends_by_itself(request):
            return
        length, own = math.log(len(request.output_ids)), request.finish_reason == "stop"
        estimates = self._estimates(request)
        for estimate, error in zip(estimates, self._errors, strict=True):
            error.add(abs(_off(length, estimate, own)))
        self._learned.learn(request, length, own)
        self._usual.learn(request, length, own)
        self._texts += 1

    def _trusts(self) -> bool:
        learned, usual = self._errors
        return self._texts >= ENOUGH and learned.mean <= usual.mean

    def _estimates(self, request: EngineRequest) -> tuple[float, float]:
        return self._learned.estimate(request), self._usual.estimate(request)


def _never_ends_by_itself(request: EngineRequest) -> bool:
    """Whether the text will have as many tokens as it may."""
    params = request.params
    ends = bool(params.stop_strings or params.stop_token_ids or request.stop_when)
    return not ends and (params.ignore_eos or not request.eos_ids)


def _off(length: float, estimate: float, own: bool) -> float:
    """Returns how much longer than estimated a text was; 0 if it was cut off before it could be."""
    return length - estimate if own else max(0.0, length - estimate)


class _Error:
    """A mean of the latest absolute errors."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    @property
    def mean(self) -> float:
        return self._sum / self._weight if self._weight else math.inf

    def add(self, error: float) -> None:
        self._sum = MEMORY * self._sum + error
        self._weight = MEMORY * self._weight + 1


class _Linear:
    """A linear estimate, with the certainty of each weight: a Kalman filter without covariances.

    What a weight learns from a text is in proportion to how uncertain it still is.
    """

    def __init__(self) -> None:
        self._weights: Values = np.zeros(BUCKETS)
        self._variances: Values = np.ones(BUCKETS)
        self._shift = _Shift()

    def estimate(self, request: EngineRequest) -> float:
        return self._raw(*_features(request)) + self._shift.value

    def _raw(self, at: Indices, features: Values) -> float:
        return float(self._weights[at] @ features)

    def learn(self, request: EngineRequest, length: float, own: bool) -> None:
        at, features = _features(request)
        raw = self._raw(at, features)
        self._shift.learn(_off(length, raw + self._shift.value, own))
        self._variances[at] += FORGETTING
        spread = self._variances[at] * features
        gain = spread / (float(spread @ features) + NOISE)
        self._weights[at] += gain * _off(length, raw, own)
        self._variances[at] -= gain * spread


class _Usual:
    """The median length of texts with about the same limit, the latest kinds of them."""

    def __init__(self) -> None:
        self._shifts: OrderedDict[int, _Shift] = OrderedDict()

    def estimate(self, request: EngineRequest) -> float:
        shift = self._shifts.get(_class_of(request))
        return math.log(request.max_tokens) + (shift.value if shift else 0.0)

    def learn(self, request: EngineRequest, length: float, own: bool) -> None:
        kind = _class_of(request)
        shift = self._shifts.setdefault(kind, _Shift())
        shift.learn(_off(length, self.estimate(request), own))
        self._shifts.move_to_end(kind)
        while len(self._shifts) > CLASSES:
            self._shifts.popitem(last=False)


class _Shift:
    """What is added to an estimate so that half of what comes lies above it."""

    def __init__(self) -> None:
        self.value = 0.0
        self._seen = 0

    def learn(self, off: float) -> None:
        """Moves half a step towards what came, and by smaller steps the more has come."""
        self._seen += 1
        step = max(0.05, 1.0 / math.sqrt(self._seen))
        self.value += step * (0.5 if off > 0 else -0.5 if off < 0 else 0.0)


def _class_of(request: EngineRequest) -> int:
    """Returns a number that requests have in common whose limits are within a factor of two."""
    return round(math.log2(request.max_tokens))


def _features(request: EngineRequest) -> tuple[Indices, Values]:
    """Returns which weights count for a request, and how much."""
    prompt = request.prompt_ids
    words = dict.fromkeys([*prompt[:LOOKED_AT], *prompt[-LOOKED_AT:]])
    options = list(_options(request))
    at = [_bucket(0, token) for token in words] + [_bucket(kind, of) for kind, of in options]
    share = 1.0 / math.sqrt(max(1, len(words)))  # long prompts count no more than short ones
    whole = [_bucket(9, part) for part in range(3)]
    sizes = [1.0, math.log1p(len(prompt)), math.log(request.max_tokens)]
    return (
        np.array([*at, *whole], dtype=np.int64),
        np.array([share] * len(words) + [1.0] * len(options) + sizes),
    )


def _options(request: EngineRequest) -> Iterator[tuple[int, int]]:
    """Yields what else has to do with a text's length, as pairs of a kind and a value."""
    params = request.params
    yield 1, int(params.greedy)
    for string in params.stop_strings:
        yield 2, sum(ord(letter) * 31**place for place, letter in enumerate(string[:8]))
    for token in params.stop_token_ids:
        yield 3, token
    yield 4, int(request.options.mask is not None)
    if request.tag is not None:
        yield 5, sum(ord(letter) * 31**place for place, letter in enumerate(request.tag[:16]))


def _bucket(kind: int, value: int) -> int:
    return ((value * 31 + kind) * HASH & 0xFFFFFFFF) * BUCKETS >> 32
