"""Bayesian optimisation of the sub-layers that `layer_skip` leaves out.

Draft & Verify (Zhang et al., ACL 2024), section 3.3: for each layer two booleans, whether its
attention and whether its MLP is left out. The paper models the objective by a Gaussian process;
here it is a tree-structured Parzen estimator (Bergstra et al. 2011, by Optuna), made for booleans,
and a choice that is far behind after some of the prompts is given up.

What a choice brings is predicted from real rounds, played one prompt at a time with drafts of a
fixed length. They tell how many of the drafted tokens are accepted, under the caches that drafting
really has, and what a drafting and a scoring pass take. From these the tokens per second follow for
any length of the drafts, and the best length counts. Counting the tokens of a few short texts
against the clock would be noisier: medians of passes leave out what else the machine did, and one
scoring time serves all trials.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from outpace.core.params import SamplingParams
from outpace.core.stats import Seconds
from outpace.draft.base import Round
from outpace.draft.fingerprint import Fingerprint
from outpace.engine.engine import Observer
from outpace.errors import ConfigError
from outpace.llm import LLM
from outpace.methods.self_speculation.layer_skip import LayerSkip
from outpace.methods.self_speculation.skipped_layers import SkippedLayers, default_skipped_layers
from outpace.targets.base import NO_SUBLAYERS, SubLayers

# -- trials ----------------------------------------------------------------------------------------

KEPT = 400
"""Latest rounds of which the median times are taken."""

UNSURE = 1.0
"""Accepted and refused tokens that are added at each depth, half each, so that a few lucky tokens
do not count as certainty."""


@dataclass
class Outcome:
    """What the rounds of one choice of sub-layers have shown."""

    drafted: list[int]  # by depth
    accepted: list[int]
    drafting: list[float] = field(default_factory=list)  # seconds per drafted token

    def rates(self) -> list[float]:
        """Returns, by depth, the share of drafted tokens there that were accepted, given that those
        before them were."""
        found = []
        for depth, accepted in enumerate(self.accepted):
            reached = self.drafted[depth] if depth == 0 else self.accepted[depth - 1]
            found.append((accepted + UNSURE / 2) / (reached + UNSURE))
        return found

    def acceptance(self) -> float:
        """Returns the share of the drafted tokens that were accepted."""
        return sum(self.accepted) / max(1, sum(self.drafted))


@dataclass(frozen=True)
class Prediction:
    """What a choice of sub-layers promises."""

    tokens_per_second: float
    drafted: int
    """Tokens per draft with which that is reached."""
    acceptance: float


class LayerTrials:
    """Plays rounds of one model with different sub-layers left out."""

    def __init__(self, llm: LLM, prompts: Sequence[str], tokens: int, temperature: float) -> None:
        """llm: with the method "layer_skip" and drafts of a fixed length. tokens: of each text."""
        drafter, count = llm.engine.drafter, llm.config.num_speculative_tokens
        if not isinstance(drafter, LayerSkip) or not isinstance(count, int):
            raise ConfigError("layers are tuned with layer_skip and a fixed number of tokens.")
        self._llm, self._drafter, self._depth = llm, drafter, count
        SamplingParams(temperature=temperature, max_tokens=tokens)  # refuses what is none
        self._prompts, self._tokens, self._temperature = list(prompts), tokens, temperature
        self._plain: deque[Seconds] = deque(maxlen=KEPT)
        self._scored: deque[Seconds] = deque(maxlen=KEPT)

    @property
    def setting(self) -> dict[str, Any]:
        """What the predictions of all trials depend on, besides the model: those of other prompts
        and options cannot be compared with them."""
        listed, target = json.dumps(self._prompts).encode(), self._llm.target
        return {
            "prompts": hashlib.sha256(listed).hexdigest()[:16],
            "tokens": self._tokens,
            "temperature": self._temperature,
            "dtype": str(target.dtype).removeprefix("torch."),
            "quantization": target.quantization or "none",
            "device": target.device.type,
            "threads": torch.get_num_threads(),
        }

    @property
    def prompts(self) -> int:
        """How many prompts each trial plays."""
        return len(self._prompts)

    def measure_plain(self) -> float:
        """Returns the tokens per second of plain decoding, which everything is compared with."""
        for number in range(len(self._prompts)):
            self._play(number, "off", self._note_plain)
        return 1 / median(seconds.total for seconds in self._plain)

    def play(self, skipped: SubLayers) -> Iterator[Prediction]:
        """Yields after each prompt what the rounds so far promise."""
        self._drafter.leave_out(skipped)
        outcome = Outcome([0] * self._depth, [0] * self._depth)
        for number in range(len(self._prompts)):
            self._play(number, None, lambda trace: self._note(trace, outcome))
            if outcome.drafting:
                yield self._prediction(outcome)

    def _play(self, number: int, speculative: Literal["off"] | None, observer: Observer) -> None:
        params = SamplingParams(
            temperature=self._temperature,
            seed=number,
            max_tokens=self._tokens,
            ignore_eos=True,
            speculative=speculative,
        )
        with self._llm.engine.observing(observer):
            self._llm.generate(self._prompts[number], params)

    def _note_plain(self, trace: Round) -> None:
        self._plain.append(trace.seconds)

    def _note(self, trace: Round, outcome: Outcome) -> None:
        (played,) = trace.outcomes
        if played.drafted != self._depth:
            return  # the first round, which reads the prompt, and the last one
        for depth in range(played.drafted):
            outcome.drafted[depth] += 1
            outcome.accepted[depth] += depth < len(played.path)
        outcome.drafting.append(trace.seconds.draft / played.drafted)
        self._scored.append(trace.seconds)

    def _prediction(self, outcome: Outcome) -> Prediction:
        """The draft length with the most tokens per second: 1 + a1 + a1 a2 + ... for the time of a
        round, in which a drafted token costs a pass of the drafter and its share of the scoring."""
        drafting = median(outcome.drafting)
        plain = median(seconds.total for seconds in self._plain)
        whole = median(seconds.score + seconds.rest for seconds in self._scored)
        more = max(0.0, whole - plain) / self._depth  # what scoring one token more takes
        tokens, reached = 1.0, 1.0
        best = Prediction(0.0, 0, outcome.acceptance())
        for drafted, rate in enumerate(outcome.rates(), 1):
            reached *= rate
            tokens += reached
            speed = tokens / (plain + drafted * (drafting + more))
            if speed > best.tokens_per_second:
                best = Prediction(speed, drafted, outcome.acceptance())
        return best


# -- the search ------------------------------------------------------------------------------------

NAME = "layers"
BEGIN = b'{"op_code"'
"""What the file of a study begins with."""
GUESSES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
"""Shares of the attention parts that are left out in the first trials; of the MLPs, a third of
that. Drawn evenly, half of all parts would be, and nothing would be accepted."""


INTERRUPTED = "interrupted"
"""Marks a trial that Ctrl-C ended: it counts as none, and its choice is tried again."""


@dataclass(frozen=True)
class Progress:
    """How far the search is."""

    trials: int
    best: float | None
    """Tokens per second, predicted; None before the first trial has ended."""
    plain: float


class LayerSearch:
    """A search for one model, kept in a file so that it can be resumed."""

    def __init__(
        self, trials: LayerTrials, model: Fingerprint, kept_in: Path, seed: int = 0
    ) -> None:
        """kept_in: the study's file, made if there is none; ``ConfigError`` if it is about another
        model, other prompts or other options, or no such file."""
        if not 0 <= seed < 1 << 32:
            raise ConfigError(f"the seed must be in [0, 2**32), not {seed}.")
        self._trials, self._model, self._seed = trials, model, seed
        self._study = self._opened(kept_in)
        self.plain = trials.measure_plain()
        """Tokens per second, with which the trials of this sitting are compared."""

    def _opened(self, path: Path) -> optuna.Study:
        optuna.logging.set_verbosity(logging.WARNING)
        known = path.exists()
        try:
            if known:
                _check_begun(path)
                _cut_half_a_line(path)
            study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(path))),
                study_name=NAME,
                direction="maximize",
                load_if_exists=True,
                # Not multivariate: one surprise among 2L booleans says little about the others.
                sampler=optuna.samplers.TPESampler(seed=self._seed, n_startup_trials=len(GUESSES)),
                pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1),
            )
            own, setting = (study.user_attrs.get(name) for name in ("model", "setting"))
        except (OSError, ValueError, KeyError, RuntimeError, AssertionError) as error:
            raise ConfigError(
                f"{str(path)!r} is not a study of `outpace tune layers`, or cannot be written "
                f"({error}): name another file with --study."
            ) from error
        if own is not None and not self._model.same_model(Fingerprint(**own)):
            raise ConfigError(
                f"the study in {str(path)!r} is about {Fingerprint(**own)}, not {self._model}: "
                "name another file with --study."
            )
        if own is not None:
            self._check_setting(setting or {}, path)
        if not known or own is None:
            study.set_user_attr("setting", self._setting)
            study.set_user_attr("model", vars(self._model))
            for guess in self._guesses():
                study.enqueue_trial(guess)
        return study

    @property
    def _setting(self) -> dict[str, Any]:
        return {**self._trials.setting, "seed": self._seed}

    def _check_setting(self, kept: Mapping[str, Any], path: Path) -> None:
        """Raises ``ConfigError`` for a study whose trials played other prompts, or with other
        options, than those of this run."""
        changed = sorted(name for name, value in self._setting.items() if kept.get(name) != value)
        if changed:
            raise ConfigError(
                f"the study in {str(path)!r} was made with other {' and '.join(changed)}, and its "
                "trials cannot be compared with new ones: give the same ones, or name another file "
                "with --study."
            )

    def _guesses(self) -> Iterator[dict[str, bool]]:
        count = self._model.layers
        yield self._booleans(default_skipped_layers(count))
        generator = random.Random(self._seed)
        later = range(count // 4, count)
        for share in GUESSES:
            attention = [layer for layer in later if generator.random() < share]
            mlp = [layer for layer in later if generator.random() < share / 3]
            yield self._booleans(SubLayers(frozenset(attention), frozenset(mlp)))

    def _booleans(self, skipped: SubLayers) -> dict[str, bool]:
        parts = {"attention": skipped.attention, "mlp": skipped.mlp}
        return {
            f"{part} {layer}": layer in left_out
            for part, left_out in parts.items()
            for layer in range(self._model.layers)
        }

    # -- searching -----------------------------------------------------------------------------

    @property
    def done(self) -> int:
        """Trials that have ended, those of earlier runs included; not those that were
        interrupted."""
        trials = self._study.get_trials(deepcopy=False)
        return sum(
            trial.state.is_finished() and INTERRUPTED not in trial.user_attrs for trial in trials
        )

    def run(self, trials: int, report: Callable[[Progress], None]) -> bool:
        """Plays trials until the study has that many; returns whether it was not interrupted.

        report: called after each trial. Ctrl-C ends the search; what was found stays.
        """
        while self.done < trials:
            trial = self._study.ask()
            try:
                self._try(trial)
            except KeyboardInterrupt:
                trial.set_user_attr(INTERRUPTED, True)
                self._study.enqueue_trial(trial.params)  # comes first when the search goes on
                self._study.tell(trial, state=TrialState.FAIL)
                return False
            report(Progress(self.done, self._best_speed(), self.plain))
        return True

    def _try(self, trial: optuna.Trial) -> None:
        skipped = self._suggested(trial)
        prediction = None
        # Without any part left out the drafter would be the target, and without all there is none.
        if skipped != NO_SUBLAYERS and len(skipped.complete_layers) < self._model.layers:
            for step, prediction in enumerate(self._trials.play(skipped), 1):
                trial.report(prediction.tokens_per_second / self.plain, step)
                if step < self._trials.prompts and trial.should_prune():
                    self._study.tell(trial, state=TrialState.PRUNED)
                    return
        if prediction is None:
            self._study.tell(trial, state=TrialState.FAIL)
            return
        trial.set_user_attr("drafted", prediction.drafted)
        trial.set_user_attr("acceptance", prediction.acceptance)
        self._study.tell(trial, prediction.tokens_per_second / self.plain)

    def _suggested(self, trial: optuna.Trial) -> SubLayers:
        left_out: dict[str, list[int]] = {"attention": [], "mlp": []}
        for part, numbers in left_out.items():
            for layer in range(self._model.layers):
                if trial.suggest_categorical(f"{part} {layer}", [False, True]):
                    numbers.append(layer)
        return SubLayers(*map(frozenset, left_out.values()))

    # -- what was found --------------------------------------------------------------------------

    def _best(self) -> optuna.trial.FrozenTrial | None:
        complete = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return max(complete, key=lambda trial: trial.value or 0.0, default=None)

    def _best_speed(self) -> float | None:
        """Tokens per second that the best trial promises in this sitting."""
        best = self._best()
        return None if best is None or best.value is None else best.value * self.plain

    def chosen(self) -> SkippedLayers | None:
        """Returns the best sub-layers so far, None before any trial has ended."""
        best = self._best()
        speed = self._best_speed()
        if best is None or speed is None:
            return None
        left_out = {name for name, skipped in best.params.items() if skipped}
        layers = range(self._model.layers)
        found: dict[str, Any] = {
            "trials": self.done,
            "predicted_tokens_per_second": round(speed, 3),
            "plain_tokens_per_second": round(self.plain, 3),
            **best.user_attrs,
        }
        attention, mlp = (
            frozenset(layer for layer in layers if f"{part} {layer}" in left_out)
            for part in ("attention", "mlp")
        )
        return SkippedLayers(self._model, SubLayers(attention, mlp), found)


def _check_begun(path: Path) -> None:
    """Raises ``ValueError`` for a file that Optuna has not written: it would write after it."""
    with path.open("rb") as file:
        begin = file.read(len(BEGIN))
    if begin and begin != BEGIN:
        raise ValueError(f"it begins with {begin!r}")


def _cut_half_a_line(path: Path) -> None:
    """Removes the last line of a study where it has no end, as after a crash or on a full disk.
    Optuna would write after it, and not read the study again."""
    with path.open("r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if content.startswith(BEGIN) and 0 < end < len(content):
            file.truncate(end)
