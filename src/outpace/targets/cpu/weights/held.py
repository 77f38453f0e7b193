"""Layers that hold their weight in another form than they show it in."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class ShowsWeight(nn.Module):
    """A layer whose ``weight`` is made anew at each look; ``state_dict`` holds it, too, as that of
    the layer that this one stands for does."""

    @property
    def weight(self) -> Tensor:
        """The plain weight: a copy."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


class LaidOut(nn.Module):
    """A layer whose weight lies in an order that only one kind of product reads, and that can be
    neither copied nor written. Copies and pickles hold the plain weight, and lay it out again."""

    OF_PROCESS = ("_packed", "_compilable")
    """Attributes that mean something in this process only."""

    def lay_out(self, plain: Tensor) -> None:
        """Sets `OF_PROCESS` from a weight as `plain` returns it, which is not kept."""
        raise NotImplementedError

    def plain(self) -> Tensor:
        """Returns what the weight was laid out from: a copy."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name not in self.OF_PROCESS}
        return {**kept, "plain_weight": self.plain()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = dict(state)
        plain = kept.pop("plain_weight")
        super().__setstate__(kept)  # type: ignore[no-untyped-call]
        self.lay_out(plain)
