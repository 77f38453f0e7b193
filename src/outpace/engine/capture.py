"""Passes that run without Python: compiled on a CPU, recorded as CUDA graphs on a GPU.

This is the only place that knows of either. Chains and trees are both passes of fixed shapes
(`targets.hf.fixed`), of targets and of draft models alike; distributions, rules and drafters are
not recorded. On a CPU the tests record the same steps as traces of their operations and replay
these on static buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import reason_of
from outpace.targets.hf.fixed import CaptureFailed, FixedShapeConfig, Outputs, Step, StepRunner

RECOMPILATIONS = 64
"""Compilations of one function after which torch gives up; its own limit of 8 is meant for
functions with one caller."""

THIS_THREAD = "thread_local"
"""Other threads may use the device during a recording, as those that prepare images do."""


def capture_for(model: nn.Module, required: bool = True) -> FixedShapeConfig | None:
    """Returns the way to run a model's passes that suits the device the model is on; None to run
    them as they come.

    required: whether a user has asked for it; otherwise a model whose passes cannot be recorded
    runs them as they come, and so does one on a CPU, to compile which takes minutes.
    """
    device: Any = model.device
    if device.type == "cuda":
        return FixedShapeConfig(model, CudaGraphs(), pads=True, required=required)
    if not required:
        return None
    return FixedShapeConfig(CompiledForward(model), EagerRunner(), pads=False, required=required)


class EagerRunner(StepRunner):
    """Runs steps as they are: what is compiled in them is compiled for itself."""

    def _run(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        return step(*inputs)


@dataclass(frozen=True, eq=False)
class Recording:
    """A step that can be repeated on its own buffers."""

    replay: Callable[[], Any]
    inputs: list[Tensor]
    outputs: Outputs


class CudaGraphs(StepRunner):
    """Makes each step a CUDA graph, which is replayed on its own input buffers.

    Positions, masks and slots are derived from the inputs inside the graph, so that a replay copies
    some dozen integers and launches once. All steps share their memory: what one returns must be
    done with before the next.

    A step is recorded when it comes the second time. Many come only once, and recording one takes
    as long as running it several times. In the first run libraries make their handles and choose
    their kernels, which they could not do in a recording.
    """

    def __init__(self) -> None:
        super().__init__()
        self._have_run: set[Hashable] = set()
        self._recordings: dict[Hashable, Recording] = {}
        self._pool: Any = None

    def _run(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        recording = self._recordings[key]
        for buffer, new in zip(recording.inputs, inputs, strict=True):
            buffer.copy_(new, non_blocking=True)
        recording.replay()
        return recording.outputs

    def _run_unready(self, key: Hashable, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        if key not in self._have_run:
            self._have_run.add(key)
            return step(*inputs)
        try:
            recording = self._record(step, [tensor.clone() for tensor in inputs])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # as many kinds as there are things that cannot be recorded
            raise CaptureFailed(reason_of(error, named=True)) from error
        self._recordings[key] = recording
        self._ready.add(key)
        return self._run(key, step, inputs)

    def _record(self, step: Step, buffers: list[Tensor]) -> Recording:
        with torch.cuda.device(buffers[0].device):
            return self._recorded(step, buffers)

    def _recorded(self, step: Step, buffers: list[Tensor]) -> Recording:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=THIS_THREAD):
                outputs = step(*buffers)
        except Exception:
            _tidy_up(stream)
            raise
        self._pool = graph.pool()
        return Recording(graph.replay, buffers, outputs)

    def forget(self) -> None:
        self._ready.clear()
        self._recordings.clear()
        self._pool = None  # one without graphs cannot be recorded into


def _tidy_up(stream: torch.cuda.Stream) -> None:
    """Leaves torch as it was before a recording that failed. stream: the one before it.

    torch stays on the stream of the recording. And its generator of this device waits for an end of
    the recording that does not come, and draws nothing for anybody meanwhile ("Offset increment
    outside graph capture"). It is the end of any recording that it waits for.
    """
    torch.cuda.set_stream(stream)
    with suppress(RuntimeError):  # the failure that came first is the one to report
        spare = torch.zeros(1, device=stream.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=THIS_THREAD):
            spare.add_(1)
    torch.cuda.set_stream(stream)


class CompiledForward:
    """A model's whole forward as one compiled function (`torch.compile`), for any width from 2 on.

    Compilations are kept on disk between processes by torch itself.
    """

    def __init__(self, model: nn.Module) -> None:
        forward: Any = model.forward
        # Where code of ours stands for the whole model, torch compiles transformers' own.
        plain: Any = getattr(forward, "plain", forward)
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
