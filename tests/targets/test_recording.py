"""Recorded steps: what is repeated without Python is what would have been done with it.

A CUDA graph repeats the kernels of one step on its own buffers, whatever the host would have
decided meanwhile. Here a trace of the same operations does, on a CPU, and nothing that a recording
could not hold is let through while it is made: no question to the host, no tensor of its numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from outpace import LLM, SamplingParams
from outpace.core import rng
from outpace.core.logits import categorical
from outpace.draft.registry import find_drafter
from outpace.engine.capture import CudaGraphs, Recording
from outpace.errors import ConfigError
from outpace.targets.hf.fixed import CaptureFailed, FixedShapeConfig, Step
from outpace.targets.hf.loading.loaded import LoadedModel
from representatives import representatives

from .families import CONTEXT, build, drafter, noised, target
from .generating import greedy, ids

PROMPTS = [[5, 9, 2, 41], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]

ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "item")


class OnTheDevice(TorchDispatchMode):
    """Fails where the host is asked, or sends something."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        booleans = name == "index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if booleans or any(name.startswith(asking) for asking in ASKING):
            raise AssertionError(f"{name} inside a recorded step")
        return func(*args, **(kwargs or {}))


class Traced(CudaGraphs):
    """Records traces instead of CUDA graphs."""

    def _record(self, step: Step, buffers: list[Tensor]) -> Recording:
        with OnTheDevice():
            step(*buffers)
        graph = make_fx(step)(*buffers)
        outputs = tuple(output.clone() for output in graph(*buffers))

        def replay() -> None:
            for output, new in zip(outputs, graph(*buffers), strict=True):
                output.copy_(new)

        return Recording(replay, buffers, outputs)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws as there, where plain integers and whole sums are no shortcut."""
    monkeypatch.setattr(rng, "FEW", 0)
    monkeypatch.setattr(categorical, "SMALL", 0)


def recorded(llm: LLM) -> Iterator[Traced]:
    """Lets an engine play as with ``compile=True`` on a GPU; yields its recorders."""
    engine: Any = llm.engine
    for runner in (engine.target.runner, getattr(engine.drafter, "runner", None)):
        if runner is not None:
            steps = Traced()
            runner.use_fixed_shapes(FixedShapeConfig(runner.model, steps, pads=True))
            yield steps


def kinds(steps_of: Traced) -> set[Any]:
    return {key[0] for key in steps_of._recordings}  # type: ignore[index]


PARAMS = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "logit_bias": {3: 2.0}},
]


def params(options: dict[str, Any], seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=6, ignore_eos=True, **options)


@pytest.mark.parametrize(
    ("family", "options"),
    representatives(
        [*(("llama", options) for options in PARAMS), ("gpt2", PARAMS[1]), ("gemma2", PARAMS[1])],
        [("llama", PARAMS[0]), ("gemma2", PARAMS[1])],
    ),
)
def test_recorded_texts_are_the_same(family: str, options: dict[str, Any]) -> None:
    config = {"method": "draft_model", "model": drafter(family), "num_speculative_tokens": 2}
    limits = {"max_num_seqs": 3, "max_model_len": CONTEXT}
    plain, found = (LLM(target(family), speculative_config=config, **limits) for _ in range(2))
    runners = list(recorded(found))
    for seed in (1, 2):  # the second time all is repeated, for other numbers
        asked = [params(options, seed + 10 * row) for row in range(len(PROMPTS))]
        assert ids(found.generate(PROMPTS, asked)) == ids(plain.generate(PROMPTS, asked))
    alone = params(options, 3)
    assert ids(found.generate(PROMPTS[:1], alone)) == ids(plain.generate(PROMPTS[:1], alone))
    assert [kinds(steps_of) for steps_of in runners] == [{"pass"}, {"pass"}]


def test_recordings_find_rows_wherever_they_lie() -> None:
    config = {"model": drafter("llama"), "num_speculative_tokens": 1}
    limits = {"max_num_seqs": 4, "max_model_len": CONTEXT}
    plain, found = (LLM(target("llama"), speculative_config=config, **limits) for _ in range(2))
    of_target, of_drafter = recorded(found)
    for ended in (0, 1, 0, 1):  # whichever row ends first, the others stay where they are
        asked = [greedy(1 if row == ended else 11 - 2 * row) for row in range(4)]
        prompts = [*PROMPTS, [3, 1]]
        assert ids(found.generate(prompts, asked)) == ids(plain.generate(prompts, asked))
    for steps in (of_target, of_drafter):
        spacings = {key[1][3] for key in steps._recordings}  # type: ignore[index]
        assert None in spacings, "rows at other distances are looked up on the device"
        assert len(spacings) > 1, "and equal distances from the beginning are a part of the key"


@pytest.mark.parametrize("method", ["draft_tree", "ngram"])
def test_other_drafters_are_recorded_as_far_as_they_can_be(method: str) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 6}
    if method == "draft_tree":
        config |= {"model": drafter("llama"), "branching": [2, 2]}
    limits = {"max_num_seqs": 3, "max_model_len": CONTEXT}
    plain, found = (LLM(target("llama"), speculative_config=config, **limits) for _ in range(2))
    runners = list(recorded(found))
    asked = params({"temperature": 1.0}, 1)
    for _ in range(2):  # what comes the second time is recorded
        assert ids(found.generate(PROMPTS, asked)) == ids(plain.generate(PROMPTS, asked))
    assert kinds(runners[0]) == {"pass"}


@pytest.mark.parametrize("method", ["medusa", "eagle3", "dflash"])
def test_heads_are_given_the_states_of_recorded_passes(method: str) -> None:
    dummy_options = find_drafter(method).dummy_options(LoadedModel(target("llama"), None, "llama"))
    config = {"method": method, "num_speculative_tokens": 3, **dummy_options}
    limits = {"max_num_seqs": 3, "max_model_len": CONTEXT}
    plain, found = (LLM(target("llama"), speculative_config=config, **limits) for _ in range(2))
    (steps,) = recorded(found)
    for asked in (greedy(12), params({"temperature": 1.0}, 1)):
        assert ids(found.generate(PROMPTS, asked)) == ids(plain.generate(PROMPTS, asked))
    assert {key[-1] for key in steps._recordings} == {True}  # type: ignore[index]


@pytest.mark.parametrize("method", ["suffix", "recycling", "medusa"])
def test_texts_that_warm_up_teach_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No drafter remembers them, or learns from them."""
    dummy_options = find_drafter(method).dummy_options(LoadedModel(target("llama"), None, "llama"))
    config = {"method": method, "num_speculative_tokens": 3, **dummy_options}
    if method == "medusa":
        config["online"] = {"every": 1, "window": 16, "positions": "all", "share": 1.0}
    limits = {"max_num_seqs": 2, "max_model_len": CONTEXT}
    plain = LLM(target("llama"), speculative_config=config, compile=False, **limits)
    record_by_traces(monkeypatch)
    warm = LLM(target("llama"), speculative_config=config, **limits)
    assert warm.compile_seconds > 0 == plain.compile_seconds
    updates = []
    for llm in (plain, warm):
        updates.append([one.updates for one in cast(Any, llm.engine.drafter.learners())])
    assert updates[0] == updates[1] == ([0] if method == "medusa" else [])
    assert text_and_counts(plain) == text_and_counts(warm)
    assert all(one.updates > 0 for one in cast(Any, warm.engine.drafter.learners()))


def test_texts_that_warm_up_teach_no_chooser(monkeypatch: pytest.MonkeyPatch) -> None:
    drafters = [{"method": "ngram"}, {"method": "suffix"}]
    record_by_traces(monkeypatch)
    for method, learned in (("ucb", "pulls"), ("hedge", "gains")):
        config = {"method": method, "num_speculative_tokens": 3, "drafters": drafters}
        llms = [
            LLM(target("llama"), speculative_config=config, max_model_len=CONTEXT, compile=compiled)
            for compiled in ("auto", False)
        ]
        assert llms[0].compile_seconds > 0
        warm, plain = (dict(getattr(llm.engine.drafter, learned)) for llm in llms)
        assert warm == plain
        llms[0].generate([[5, 6, 7, 5, 6, 7, 5, 6]], greedy(12))
        assert dict(getattr(llms[0].engine.drafter, learned)) != plain


def test_texts_that_warm_up_are_not_kept_in_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_by_traces(monkeypatch)
    path = tmp_path / "state.json"
    config = {"method": "auto", "model": drafter("llama"), "state": str(path)}
    llm = LLM(target("llama"), speculative_config=config, max_num_seqs=2, max_model_len=CONTEXT)
    assert llm.compile_seconds > 0
    assert not path.exists()
    llm.generate([5, 6, 7], greedy(6))
    savings = json.loads(path.read_text())["state"]["savings"]
    assert all(sums["all"][0] <= 6 for sums in savings.values()), "tokens of this text alone"


def text_and_counts(llm: LLM) -> tuple[list[int], int, int]:
    """Writes the text of a warm-up, which would be found again; returns it, its passes, and the
    drafted tokens that were taken."""
    (request,) = llm.requests([0] * 9, greedy(12))
    llm.engine.add(request)
    while not request.finished:
        llm.engine.step()
    metrics = request.metrics
    return request.output_ids, metrics.num_target_passes, metrics.num_accepted_tokens


def record_by_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("llm", "building"):
        monkeypatch.setattr(f"outpace.{module}.capture_of", lambda *_: by_traces)


def by_traces(model: Any) -> FixedShapeConfig:
    return FixedShapeConfig(model, Traced(), pads=True)


ASKING_STEPS: list[Step] = [lambda x: (x * int(x.sum()),), lambda x: (x + torch.tensor([1, 2]),)]


@pytest.mark.parametrize("step", ASKING_STEPS)
def test_a_question_to_the_host_is_noticed(step: Step) -> None:
    steps = Traced()
    steps.run("k", step, [torch.ones(2)])
    with pytest.raises(CaptureFailed, match="inside a recorded step"):
        steps.run("k", step, [torch.ones(2)])


def test_a_step_is_recorded_when_it_comes_again() -> None:
    steps, played = Traced(), []

    def step(x: Tensor) -> tuple[Tensor]:
        played.append(x)
        return (x + 1,)

    seconds = []
    for number in range(4):
        (found,) = steps.run("k", step, [torch.full((2,), number)])
        assert found.tolist() == [number + 1] * 2
        assert bool(steps._recordings) == (number > 0)
        seconds.append(steps.seconds)
    assert 0 < seconds[0] < seconds[1] == seconds[2] == seconds[3], "when all is ready it is free"
    before = len(played)
    steps.forget()
    steps.run("k", step, [torch.zeros(2)])
    assert steps._recordings, "what has run before is recorded at once"
    assert len(played) > before


def test_recordings_last_while_texts_come_and_go() -> None:
    """Long texts end one after another, and others begin: the buffers stay where they are."""
    model = build("llama", max_position_embeddings=1024)
    config = {"model": noised(model, 0.05), "num_speculative_tokens": 3}
    limits = {"max_num_seqs": 4, "max_model_len": 1024}
    plain = LLM(model, speculative_config=config, compile=False, **limits)
    found = LLM(model, speculative_config=config, **limits)
    runners, exchanged = list(recorded(found)), []
    for _ in range(5):
        prompts = [[7 * row + 1] * (250 + row) for row in range(4)]
        asked = [greedy(3 + 5 * row) for row in range(4)]
        assert ids(found.generate(prompts, asked)) == ids(plain.generate(prompts, asked))
        exchanged.append([generation(plain), generation(found), *map(made, runners)])
    without = [first for first, *_ in exchanged]
    assert sorted(set(without)) == without, "without recordings most slots are given back"
    assert exchanged[2][1:] == exchanged[3][1:] == exchanged[4][1:]


def generation(llm: LLM) -> int:
    """How often the buffers of a target's cache were exchanged."""
    engine: Any = llm.engine
    return int(engine.target.runner.cache.generation)


def made(steps: Traced) -> int:
    """How many recordings there are."""
    return len(steps._recordings)


class Unwilling(CudaGraphs):
    """Records nothing."""

    def _record(self, step: Step, buffers: list[Tensor]) -> Recording:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_what_cannot_be_recorded_is_played_as_it_comes_unless_it_must_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, found = (LLM(target("llama"), max_num_seqs=3, max_model_len=CONTEXT) for _ in range(2))
    runner: Any = found.engine.target.runner
    runner.use_fixed_shapes(FixedShapeConfig(runner.model, Unwilling(), pads=True, required=False))
    assert ids(found.generate(PROMPTS, greedy(6))) == ids(plain.generate(PROMPTS, greedy(6)))
    assert not runner.fixed.records
    assert caplog.text.count("LlamaForCausalLM cannot be recorded (RuntimeError: operation") == 1
    runner.use_fixed_shapes(FixedShapeConfig(runner.model, Unwilling(), pads=True))
    with pytest.raises(ConfigError, match=r"not permitted .* leave compile out"):
        found.generate(PROMPTS, greedy(6))


def test_rows_that_end_at_different_times_need_no_recordings_of_their_own() -> None:
    """Five to seven rows are played as eight, of which some are padding, wherever they lie."""
    config = {"model": drafter("llama"), "num_speculative_tokens": 3}
    limits = {"max_num_seqs": 8, "max_model_len": CONTEXT}
    plain, found = (LLM(target("llama"), speculative_config=config, **limits) for _ in range(2))
    runners = list(recorded(found))
    for first in (1, 2, 5):  # rows leave in another order each time
        prompts = [[first + row, row] for row in range(8)]
        asked = [greedy(3 + (first * row) % 8) for row in range(8)]
        assert ids(found.generate(prompts, asked)) == ids(plain.generate(prompts, asked))
    for steps in runners:
        shapes = {key[1][:2] for key in steps._recordings}  # type: ignore[index]
        assert {rows for rows, _ in shapes} <= {1, 2, 4, 8}
        assert {columns for _, columns in shapes} <= {1, 2, 4, 8}
