"""Steps in few shapes that come again: compiled on a CPU, recorded as CUDA graphs on a GPU.

A pass sees one of a few numbers of slots and, recorded, is padded to one of a few widths, so that
little about it but the numbers in its inputs changes from round to round. What is done then is
done without Python: that is what both ways save. On a GPU all of a chain's drafting is one step,
with the drawing of its tokens, and so is its verdict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from outpace.targets.hf.placement import Spacing

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
"""Columns of a pass; wider ones are played as they come."""

PENDING = 2
"""Committed tokens that such a pass feeds at most: more are a prompt, or a model that catches up,
and come in any number."""

SLOTS = 256
"""A pass sees slots in multiples of this."""

RECOMPILATIONS = 64
"""Beyond this torch gives up; its own limit of 8 is meant for functions with one caller."""

Forward = Callable[..., Any]
Outputs = tuple[Tensor, ...]
Step = Callable[..., Outputs]
"""``step(*inputs)``: computed on the device alone, from its inputs and from buffers that stay where
they are."""


class StepRunner(ABC):
    """Plays steps whose shapes come again and again."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Spent on compiling or recording so far."""
        self._known: set[Hashable] = set()

    def play(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        """Returns ``step(*inputs)``, good until the next step. key: all that shapes the step."""
        if key in self._known:
            return self._play(key, step, inputs)
        self._known.add(key)
        begin = perf_counter()
        outputs = self._first(key, step, inputs)
        self.seconds += perf_counter() - begin
        return outputs

    @abstractmethod
    def _play(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        """Plays a step of a known key."""

    def _first(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        """Plays the first step of a key."""
        return self._play(key, step, inputs)

    def forget(self) -> None:
        """Is told that buffers have moved."""


class Eager(StepRunner):
    """Steps as they come: what is compiled in them is compiled for itself."""

    def _play(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        return step(*inputs)


@dataclass(frozen=True, eq=False)
class Recording:
    """A step that can be repeated on its own buffers."""

    replay: Callable[[], Any]
    inputs: list[Tensor]
    outputs: Outputs


class Recorder(StepRunner):
    """Each step a CUDA graph, replayed on its own input buffers.

    Positions, masks and slots are derived from the inputs inside the graph, so that a replay
    copies some dozen integers and launches once. Steps of one recorder share their memory: what one
    returns must be done with before the next.
    """

    WARM_UP = 2
    """Times that a step is played before it is recorded: libraries make their handles and choose
    their kernels in these."""

    def __init__(self) -> None:
        super().__init__()
        self._recordings: dict[Hashable, Recording] = {}
        self._pool: Any = None

    def _play(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        recording = self._recordings[key]
        for buffer, new in zip(recording.inputs, inputs, strict=True):
            buffer.copy_(new, non_blocking=True)
        recording.replay()
        return recording.outputs

    def _first(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        self._recordings[key] = self._record(step, [tensor.clone() for tensor in inputs])
        return self._play(key, step, inputs)

    def _record(self, step: Step, buffers: list[Tensor]) -> Recording:
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.WARM_UP):
                step(*buffers)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = step(*buffers)
        self._pool = graph.pool()
        return Recording(graph.replay, buffers, outputs)

    def forget(self) -> None:
        # They write to where the buffers were.
        self._known.clear()
        self._recordings.clear()
        self._pool = None  # one without graphs cannot be recorded into


class Compiled:
    """A model's whole forward as one compiled function (`torch.compile`), for any width from 2 on.

    Compilations are kept on disk between processes by torch itself.
    """

    def __init__(self, model: nn.Module) -> None:
        forward: Any = model.forward
        plain: Any = getattr(forward, "plain", forward)  # transformers' own, if ours plays it
        self._forward: Any = torch.compile(plain, fullgraph=True)

    def __call__(self, **arguments: Any) -> Any:
        tokens: Tensor = arguments["input_ids"]
        if tokens.shape[1] > 1:
            masks = arguments["attention_mask"]
            for mask in masks.values() if isinstance(masks, dict) else [masks]:
                torch._dynamo.maybe_mark_dynamic(mask, 2)
            for columns in (tokens, arguments["position_ids"]):
                torch._dynamo.maybe_mark_dynamic(columns, 1)
        # Batch, width, slots and capacity each make a graph or two before they are dynamic.
        with torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS):
            return self._forward(**arguments)


@dataclass(frozen=True)
class FixedView:
    """What a pass of a fixed shape sees of the cache, as a part of the step's key."""

    slots: int
    """Of each row."""
    spacing: Spacing | None
    """Where the rows lie, which a recorded step cannot be told later. None where they are unevenly
    spaced: then the step looks it up on the device, and any such placement will do."""


@dataclass(frozen=True, eq=False)
class Fixed:
    """How one model's passes of fixed shapes are played. forward: what stands for the model in
    them. pads: whether few widths are wanted."""

    forward: Forward
    player: StepRunner
    pads: bool

    def width(self, columns: int) -> int | None:
        """Returns the columns to pad a pass to, None if it is too wide for a fixed shape."""
        if not self.pads:
            return columns if columns <= WIDTHS[-1] else None
        return next((width for width in WIDTHS if width >= columns), None)

    def slots(self, needed: int, longest: int) -> int:
        """Returns how many slots of each row such a pass sees. longest: those of the largest
        row."""
        return min(-(-needed // SLOTS) * SLOTS, longest)


def fixed_for(model: nn.Module) -> Fixed:
    """Returns the way that suits the device the model is on."""
    device: Any = model.device
    if device.type == "cuda":
        return Fixed(model, Recorder(), pads=True)
    return Fixed(Compiled(model), Eager(), pads=False)
