"""The processes that train one drafter together, each on a part of the blocks of every step.

This is data-parallel training: each process, a rank, holds the whole target (or its part of it,
`load_sharded`) and the whole drafter, and all of them make the same step of the optimizer, with
gradients that are averaged over all blocks. DistributedDataParallel does that for a network which
is called through its ``forward()``; recipes call a drafter's other methods, so that the gradients
are averaged here, in plain sight.

A target may be split over the processes (FSDP): each holds its part of every decoder layer. Before
a layer computes, they send each other their parts of it, and after it they let go of them again
(torch's `fully_shard`), so that a process holds a layer or two at once and not the whole target,
which one GPU may be too small for. What drafters use outside the target's passes stays whole in
each process, which is little of a large model: the embedding table and the output matrix. So all
processes have to make the same number of passes, each over whatever text it has: one that made a
pass more would wait for the others for ever. This is tested with two processes that share a CPU
(gloo); it has not been run on a GPU yet.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous

from outpace.core.progress import Progress
from outpace.errors import ConfigError, OutpaceError, UnsupportedModel
from outpace.targets.hf.loading.load import load_plain
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.loading.placing import pick_device
from outpace.targets.hf.partial.layers import decoder_layers

WAIT = timedelta(days=7)
"""How long a rank waits for another one, at most: the first may write answers for hours. Whatever
has started the processes ends all of them when one fails, long before."""
COMING = timedelta(minutes=10)
"""How long it waits for all of them to have started."""
BUCKET = 1 << 24
"""Numbers that are averaged at once, if they are not of one weight: they are copied for that."""
SEEDS_APART = 1 << 40
"""From the seed of a rank to that of the next one: more than there are steps."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Ranks:
    """The processes that train together, as one of them sees them.

    With a single one nothing is sent, and every method returns what it was given.
    """

    number: int
    """Which of them this process is, from 0 on."""
    count: int

    @classmethod
    def alone(cls) -> Ranks:
        """Returns the one process of a run that has no others."""
        return cls(0, 1)

    @property
    def first(self) -> bool:
        """Whether this process writes the files and speaks to the user."""
        return self.number == 0

    @contextmanager
    def joined(self, device: str) -> Iterator[None]:
        """Waits for all ranks; within it they can send each other numbers.

        What lies on a CPU goes through gloo, also where the networks are on a GPU: waiting there
        keeps no GPU busy. Addresses are in the environment, as torchrun sets it. device: the name
        of the one with the networks.
        """
        if self.count == 1:
            yield
            return
        backend = _cuda_backend(device) if device.startswith("cuda") else "gloo"
        store = self._met()
        with _reaching_others():
            distributed.init_process_group(
                backend, store=store, rank=self.number, world_size=self.count, timeout=WAIT
            )
        try:
            yield
        except RuntimeError as error:
            # Where a target is split, torch itself sends numbers, in each layer.
            if isinstance(error, distributed.DistError) or "gloo" in str(error).lower():
                raise _unreachable(error) from error
            raise
        # Not after an error: the others are waiting elsewhere, and will not come to leave, too.
        distributed.destroy_process_group()

    def _met(self) -> Any:
        """Returns what the ranks leave messages at, once all of them have come there."""
        try:
            store, _, _ = next(rendezvous("env://", self.number, self.count, timeout=COMING))
        except RuntimeError as error:
            raise OutpaceError(
                f"of the {self.count} processes that are to train together not all have come: "
                "start them with torchrun --nproc-per-node=N -m outpace train, which starts all, "
                "or unset WORLD_SIZE for a single one."
            ) from error
        return store

    # -- what is this rank's -------------------------------------------------------------------

    def check(self, batch: int) -> None:
        """Raises ``ConfigError`` for a number of blocks per step that cannot be shared out."""
        if batch % self.count:
            raise ConfigError(
                "--batch is the blocks of text per step of all processes together, so it must be "
                f"a multiple of their number: {self.count} processes cannot share {batch}."
            )

    def part(self, batch: int) -> int:
        """Returns how many of the blocks of a step are this rank's."""
        return batch // self.count

    def share(self, numbers: Tensor) -> Tensor:
        """Returns this rank's part of the numbers of a step's blocks, in their order."""
        return numbers.view(self.count, -1)[self.number]

    def turns(self, items: Sequence[Item]) -> Sequence[Item]:
        """Returns every n-th item, n being their number: together the ranks have all of them.

        >>> Ranks(1, 3).turns("abcdefgh")
        'beh'
        """
        return items[self.number :: self.count]

    def seed(self, seed: int) -> int:
        """Returns the seed of what this rank draws: the ranks must not put the same noise on
        different blocks. The first one's is the given seed, as that of a process alone."""
        return seed + self.number * SEEDS_APART

    # -- what all ranks make together ----------------------------------------------------------

    def average(self, weights: Iterable[Tensor]) -> None:
        """Replaces the gradients of weights by their means over all ranks.

        A weight that had no part in this rank's loss has a gradient of zeros in the mean.
        """
        if self.count == 1:
            return
        gradients = []
        for weight in weights:
            if weight.requires_grad:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                gradients.append(weight.grad)
        for bucket in _buckets(gradients):
            flat = torch.cat([each.flatten() for each in bucket])
            self._summed(flat).div_(self.count)
            pieces = torch.split(flat, [each.numel() for each in bucket])
            for each, mean in zip(bucket, pieces, strict=True):
                each.copy_(mean.view_as(each))

    def mean(self, value: float) -> float:
        """Returns the mean of all ranks' values."""
        if self.count == 1:
            return value
        return float(self._summed(torch.tensor([value], dtype=torch.float64))) / self.count

    def any(self, flag: bool) -> bool:
        """Returns whether a flag is set on any rank."""
        return bool(self.largest([int(flag)]))

    def largest(self, values: Iterable[int]) -> int:
        """Returns the largest of all ranks' values, which are at least 0."""
        mine = max(values, default=0)
        return mine if self.count == 1 else self._largest([mine])[0]

    def wait(self) -> None:
        """Returns when all ranks have come here."""
        self.any(False)

    def same(self, text: str) -> bool:
        """Returns whether a text is the same on all ranks."""
        if self.count == 1:
            return True
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        largest, smallest = self._largest([number, -number])
        return largest == -smallest

    def same_weights(self, network: nn.Module) -> bool:
        """Returns whether all weights of a network are the same on all ranks, bit by bit."""
        return self.count == 1 or self.same(_checksum(network))

    @torch.no_grad()
    def broadcast(self, network: nn.Module) -> None:
        """Gives a network the weights that it has on the first rank."""
        if self.count == 1:
            return
        for value in network.state_dict().values():
            sent = value.contiguous()
            with _reaching_others():
                distributed.broadcast(sent, 0)
            value.copy_(sent)

    def gathered(self, batches: Sequence[Tensor], found: Sequence[Tensor]) -> Tensor:
        """Returns what all ranks have found, by row and in the order of the rows.

        batches: the numbers of the rows of each batch, of which this rank had its `turns`; found:
        for each of these ``[rows, P, D]``, bools where there are several ranks.
        """
        if self.count == 1:
            return torch.cat([*found])
        shape = self._largest(found[0].shape[1:] if found else [0, 0])  # one may have no batch
        whole = torch.zeros(sum(map(len, batches)), *shape, dtype=torch.uint8)
        for numbers, values in zip(self.turns(batches), found, strict=True):
            whole[numbers] = values.to(whole)
        return self._summed(whole)

    def _summed(self, values: Tensor) -> Tensor:
        with _reaching_others():
            distributed.all_reduce(values)
        return values

    def _largest(self, values: Sequence[int]) -> list[int]:
        """The largest of all ranks' numbers at each place."""
        found = torch.tensor(values, dtype=torch.int64)
        with _reaching_others():
            distributed.all_reduce(found, distributed.ReduceOp.MAX)
        return [int(each) for each in found]


def _cuda_backend(device: str) -> str:
    """Makes a GPU this process's own, and returns what sends numbers between GPUs and CPUs.

    This has not been run on a GPU yet.
    """
    torch.cuda.set_device(device)
    return "cpu:gloo,cuda:nccl"


@contextmanager
def _reaching_others() -> Iterator[None]:
    """Ends in one sentence where another rank is gone: it has said itself why."""
    try:
        yield
    except RuntimeError as error:
        raise _unreachable(error) from error


def _unreachable(error: RuntimeError) -> OutpaceError:
    return OutpaceError(
        "this process cannot reach the others that train with it, one of which may have ended "
        f"with a message of its own ({str(error).split('. ')[0]})."
    )


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields groups of tensors of one type and of `BUCKET` numbers at most, or of one tensor."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for each in tensors:
        groups.setdefault(each.dtype, []).append(each)
    for group in groups.values():
        bucket: list[Tensor] = []
        for each in group:
            if bucket and sum(one.numel() for one in bucket) + each.numel() > BUCKET:
                yield bucket
                bucket = []
            bucket.append(each)
        yield bucket


def _checksum(network: nn.Module) -> str:
    digest = hashlib.sha256()
    for value in network.state_dict().values():
        digest.update(value.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# -- a target that is split over the ranks ---------------------------------------------------------


def load_sharded(
    name: str,
    ranks: Ranks,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    lora: str | os.PathLike[str] | None = None,
    progress: Progress,
) -> LoadedModel:
    """Returns a target of which this process holds a part, to be read and never changed. All ranks
    call it, while they are `joined`.

    name: of a folder, or on the hub. Its files are mapped to memory, and on a GPU a layer at a time
    is put there before it is split. Raises ``UnsupportedModel`` for one that cannot be split.
    """
    loaded = load_plain(
        name,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        lora=lora,
        progress=progress,
    )
    progress("splitting the weights", 0.5)
    _shard(loaded, pick_device(device), ranks.count)
    progress("loaded", 1.0)
    return loaded


def is_sharded(loaded: LoadedModel) -> bool:
    """Returns whether this process holds a part of the model only."""
    return isinstance(loaded.model, FSDPModule)


def _shard(loaded: LoadedModel, device: torch.device, count: int) -> None:
    """Splits a model whose weights are on the CPU over ``count`` processes, and puts this one's
    part on its device."""
    model, layers = loaded.model, decoder_layers(loaded.model)
    _check(loaded, layers)
    model.requires_grad_(False)
    whole = _used_alone(model)
    for weight in whole:
        weight.data = weight.data.to(device)
    mesh = init_device_mesh(device.type, (count,))
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    model.register_forward_hook(_forget)


def _check(loaded: LoadedModel, layers: list[nn.Module]) -> None:
    """Raises ``UnsupportedModel`` for layers that cannot be split."""
    weights = [weight for layer in layers for weight in layer.parameters()]
    if len({*weights}) < len(weights):
        raise UnsupportedModel(
            f"layers of {loaded.name} share their weights, and only layers with weights of their "
            "own can be split: leave --shard-target out."
        )
    plain = (type(weight.data) is Tensor and weight.is_floating_point() for weight in weights)
    if loaded.packed or not all(plain):
        raise UnsupportedModel(
            f"the weights of {loaded.name} are quantised, and only plain numbers can be split: "
            "name the model as it was before, or leave --shard-target out."
        )


def _used_alone(model: nn.Module) -> set[nn.Parameter]:
    """The weights that are used outside the model's passes, and those without rows to split."""
    loaded: Any = model
    parts = [loaded.get_input_embeddings(), loaded.get_output_embeddings()]
    found = {weight for part in parts if part is not None for weight in part.parameters()}
    return found | {weight for weight in model.parameters() if weight.dim() == 0}


def _forget(model: nn.Module, given: Any, output: Any) -> None:
    """Drops what FSDP notes of a pass for a way back that does not come: the notes of all passes
    would add up, by some kilobytes each. Some versions of torch have no method for that."""
    forget = getattr(model, "reset_iter_state", None)
    if forget is not None and not torch.is_grad_enabled():
        forget()
