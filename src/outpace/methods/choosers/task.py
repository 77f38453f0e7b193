"""A drafter for each kind of prompt, as a small classifier tells them apart.

Ge et al. 2025, "Automatic task detection and heterogeneous LLM speculative decoding"
(arXiv 2505.08600).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from outpace.core.request import Request
from outpace.draft.base import Setup
from outpace.errors import ConfigError, PromptError
from outpace.methods.choosers.base import Children, dummy_configs
from outpace.methods.choosers.classifier import TaskClassifier
from outpace.methods.choosers.tagged import RoutesOptions, Tagged
from outpace.targets.hf.loading.loaded import LoadedModel


@dataclass(frozen=True, kw_only=True)
class TaskOptions(RoutesOptions):
    """What a user may set."""

    method: ClassVar[str] = "task"
    routes: Any
    """A drafter for each task of the router, {task: speculative_config}."""
    router: Any
    """The file that `outpace tune router` has written; in Python also a function from a
    prompt's token ids to a task and its probability."""
    threshold: Annotated[float, Ge(0), Le(1)] = 0.5
    """A task less probable than this is taken for unknown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.router):
            known = TaskClassifier.load(self.router).tasks
            for task in self.routes:
                if task not in known:
                    raise ConfigError(
                        f"routes names {task!r}, and {self.router} knows {', '.join(known)}."
                    )


TaskRouter = Callable[[Sequence[int]], tuple[str, float]]
"""Takes a prompt's token ids; returns its task and the probability of that."""


class Task(Tagged):
    """Drafts for each row with the child of its prompt's task; an unknown one has the default.

    The prompt's text is classified once, when the request joins the batch. A request's own tag
    (`SamplingParams.tag`) goes first where it names a route.
    """

    name: ClassVar[str] = "task"
    Options: ClassVar[type[Any]] = TaskOptions

    def __init__(
        self, given: Children, tags: Sequence[str], router: TaskRouter, threshold: float
    ) -> None:
        super().__init__(given, tags)
        self._router, self._threshold = router, threshold

    @classmethod
    def build(cls, setup: Setup) -> Task:
        options, loaded = setup.options, setup.loaded
        router = options.router
        if not callable(router):
            TaskClassifier.check_packages()
            router = _reader(TaskClassifier.load(router), loaded)
        given = Children.of(setup, options.configs)
        return cls(given, list(options.routes), router, options.threshold)

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        model, ngram = dummy_configs(loaded, "draft_model", "ngram")
        routes = {"copying": ngram, "else": model}
        return {"routes": routes, "default": ngram, "router": _by_repetition}

    def check(self, request: Request) -> None:
        super().check(request)
        if request not in self._routes:  # one that joins again is not classified again
            self._routes[request] = self.route(request)

    def route(self, request: Request) -> int:
        if request.tag in self._numbers:
            return super().route(request)
        try:  # the router may be a user's own function
            task, chance = self._router(request.prompt_ids)
            return self._numbers.get(task, 0) if chance >= self._threshold else 0
        except Exception as error:
            raise PromptError(
                f"the router of method 'task' failed on this prompt: {type(error).__name__}: "
                f"{str(error).rstrip('.')}."
            ) from error


def _reader(classifier: TaskClassifier, loaded: LoadedModel) -> TaskRouter:
    """A router that decodes a prompt and classifies its text."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"method 'task' reads the prompt's text, and {loaded.name} came without a tokenizer: "
            "pass tokenizer=."
        )

    def route(prompt: Sequence[int]) -> tuple[str, float]:
        return classifier.task_of(tokenizer.decode(list(prompt), skip_special_tokens=True))

    return route


def _by_repetition(prompt: Sequence[int]) -> tuple[str, float]:
    """The router of `dummy_options`."""
    return ("copying" if len(set(prompt)) < len(prompt) else "else"), 1.0
