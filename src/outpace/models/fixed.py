"""Passes in few shapes that come again: compiled on a CPU, recorded as CUDA graphs on a GPU.

A pass sees one of a few numbers of slots and, recorded, is padded to one of a few widths, so that
little about it but the numbers in its inputs changes from round to round. What is done then is
done without Python: that is what both ways save.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

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
Pass = Callable[..., Tensor]
"""``pass(forward, *inputs)``: the logits, computed on the device alone."""


class Fixed(ABC):
    """A way to play passes of fixed shapes with one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seconds = 0.0
        """Spent on compiling or recording so far."""
        self._known: set[Hashable] = set()

    def width(self, columns: int) -> int | None:
        """Returns the columns to pad a pass to, None if it is too wide for a fixed shape."""
        return next((width for width in WIDTHS if width >= columns), None)

    def slots(self, needed: int, capacity: int) -> int:
        """Returns how many of the cache's slots such a pass sees."""
        return min(-(-needed // SLOTS) * SLOTS, capacity)

    def play(self, key: Hashable, run: Pass, inputs: Sequence[Tensor]) -> Tensor:
        """Returns ``run(forward, *inputs)``, good until the next pass. key: all that shapes the
        pass."""
        if key in self._known:
            return self._play(key, run, inputs)
        self._known.add(key)
        begin = perf_counter()
        logits = self._first(key, run, inputs)
        self.seconds += perf_counter() - begin
        return logits

    @abstractmethod
    def _play(self, key: Hashable, run: Pass, inputs: Sequence[Tensor]) -> Tensor:
        """Plays a pass of a known key."""

    def _first(self, key: Hashable, run: Pass, inputs: Sequence[Tensor]) -> Tensor:
        """Plays the first pass of a key."""
        return self._play(key, run, inputs)

    def forget(self) -> None:
        """Is told that the cache's buffers have moved."""


class Compiled(Fixed):
    """The whole forward as one compiled function (`torch.compile`), for any width from 2 on.

    Compilations are kept on disk between processes by torch itself.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        forward: Any = model.forward
        plain: Any = getattr(forward, "plain", forward)  # transformers' own, if ours plays it
        self._forward: Any = torch.compile(plain, fullgraph=True)

    def width(self, columns: int) -> int | None:
        return columns if columns <= WIDTHS[-1] else None

    def _play(self, key: Hashable, run: Pass, inputs: Sequence[Tensor]) -> Tensor:
        return run(self._dynamic, *inputs)

    def _dynamic(self, **arguments: Any) -> Any:
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


@dataclass(frozen=True, eq=False)
class _Recording:
    graph: Any  # torch.cuda.CUDAGraph
    inputs: list[Tensor]
    logits: Tensor


class Recorded(Fixed):
    """Each pass a CUDA graph, replayed on its own input buffers.

    Positions, masks and slots are derived from the inputs inside the graph, so that a replay
    copies some dozen integers and launches once.
    """

    WARM_UP = 2
    """Passes before recording: libraries make their handles and choose their kernels in these."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._recordings: dict[Hashable, _Recording] = {}
        self._pool: Any = None

    def _play(self, key: Hashable, run: Pass, inputs: Sequence[Tensor]) -> Tensor:
        recording = self._recordings[key]
        for buffer, new in zip(recording.inputs, inputs, strict=True):
            buffer.copy_(new)
        recording.graph.replay()
        return recording.logits

    def _first(self, key: Hashable, run: Pass, inputs: Sequence[Tensor]) -> Tensor:
        self._recordings[key] = self._record(run, inputs)
        return self._play(key, run, inputs)

    def _record(self, run: Pass, inputs: Sequence[Tensor]) -> _Recording:
        buffers = [tensor.clone() for tensor in inputs]
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.WARM_UP):
                run(self.model, *buffers)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = run(self.model, *buffers)
        self._pool = graph.pool()
        return _Recording(graph, buffers, logits)

    def forget(self) -> None:
        # They write to where the buffers were.
        self._known.clear()
        self._recordings.clear()
        self._pool = None  # one without graphs cannot be recorded into


def fixed_for(model: nn.Module) -> Fixed:
    """Returns the way that suits the device the model is on."""
    device: Any = model.device
    return Recorded(model) if device.type == "cuda" else Compiled(model)
