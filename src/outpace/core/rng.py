"""Random streams as pure functions: the draw at (seed, position, role, index) is always the same.

Nothing is stored and nothing advances, so a row draws what it draws alone whatever else is in the
batch, on any device, however often anybody else has drawn. A *position* is the number of committed
tokens when the round began; since every round commits at least one token, no (position, role) is
used by two rounds. (Keying a drafted token by its own absolute position instead would reuse its
uniform after a rejection, and a verifier that looks at the whole block, like block verification,
has by then conditioned on it. The coupled rule wants exactly that reuse and has a role of its own.)
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from outpace.core.logits.categorical import Categorical

# The odd constants of SplitMix64 (Steele, Lea and Flood 2014, variant 13 of Stafford's mixers), as
# signed 64-bit integers, since torch multiplies int64 modulo 2**64.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_WORD = (1 << 64) - 1

FEW = 128
"""Numbers up to which plain integers are faster than tensors."""


class Role(IntEnum):
    """What a draw is for. Draws for different roles are independent."""

    DRAFT = 0
    STOP = 1
    NEXT = 2
    TOKEN = 3  # Gumbel noise of the coupled rule, keyed by the token's own position


def _mix(x: Tensor) -> Tensor:
    return _mix_(x.clone(), torch.empty_like(x))


def _mix_(x: Tensor, scratch: Tensor) -> Tensor:
    """`_mix` in place; ``scratch`` is of the same shape. New memory for each of these steps would
    take longer than the steps, where there is a number for each token of a vocabulary."""
    _fold_(x, 30, scratch).mul_(_MIX_1)
    _fold_(x, 27, scratch).mul_(_MIX_2)
    return _fold_(x, 31, scratch)


def _fold_(x: Tensor, by: int, scratch: Tensor) -> Tensor:
    """x xor x shifted to the right, as if it were unsigned, in place."""
    torch.bitwise_right_shift(x, by, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (64 - by)) - 1))


def uniform(seeds: Tensor, positions: Tensor, role: Role, count: int) -> Tensor:
    """Returns ``[..., count]`` float64 uniforms in (0, 1), strictly inside.

    seeds, positions: int64, broadcast against each other.

    >>> s, t = torch.tensor([7]), torch.tensor([3])
    >>> bool((uniform(s, t, Role.STOP, 1) == uniform(s, t, Role.STOP, 4)[:, :1]).all())
    True
    """
    return uniforms(seeds, positions, (role,), count)[..., 0, :]


def uniforms(seeds: Tensor, positions: Tensor, roles: Sequence[Role], count: int) -> Tensor:
    """Returns ``[..., R, count]``: `uniform` for each of R roles, at the price of one."""
    numbers = seeds.numel() * len(roles) * count
    if seeds.device.type == "cpu" and seeds.shape == positions.shape and numbers <= FEW:
        return _one_by_one(seeds, positions, roles, count)
    indices = torch.arange(count, device=seeds.device)
    return uniforms_at(keys(seeds, positions, roles)[..., None], indices)


def keys(seeds: Tensor, positions: Tensor, roles: Sequence[Role]) -> Tensor:
    """Returns ``[..., R]`` int64: which stream of uniforms belongs to each of R roles."""
    # No tensor is made of the roles: that would be a transfer from the host.
    place = torch.stack([(positions * 8 + int(role)) * _GOLDEN for role in roles], -1)
    return _mix(_mix(seeds * _GOLDEN + _MIX_1)[..., None] ^ place)


def uniforms_at(keys: Tensor, indices: Tensor) -> Tensor:
    """Returns the uniforms at some places of streams, as `uniforms` numbers them.

    keys, indices: int64, broadcast against each other.

    >>> seed, position = torch.tensor([7]), torch.tensor([3])
    >>> whole = uniform(seed, position, Role.TOKEN, 500)[0]
    >>> bool(uniforms_at(keys(seed, position, (Role.TOKEN,))[0], torch.tensor([9])) == whole[9])
    True
    """
    bits = keys + (indices + 1) * _GOLDEN
    scratch = torch.empty_like(bits)
    return _unit_(_mix_(_mix_(bits, scratch), scratch), scratch)


def _one_by_one(seeds: Tensor, positions: Tensor, roles: Sequence[Role], count: int) -> Tensor:
    """The same numbers, by plain integers: each of some thirty operations on a tensor takes longer
    than all that is computed here."""
    found = []
    for seed, position in zip(seeds.flatten().tolist(), positions.flatten().tolist(), strict=True):
        base = _mixed(seed * _GOLDEN + _MIX_1)
        keys = [_mixed(base ^ ((position * 8 + role) * _GOLDEN & _WORD)) for role in roles]
        found += [_mixed(_mixed(key + i * _GOLDEN)) for key in keys for i in range(1, count + 1)]
    scaled = [((bits >> 12) + 0.5) * 2.0**-52 for bits in found]
    shape = *seeds.shape, len(roles), count
    return torch.tensor(scaled, dtype=torch.float64).view(shape)


def _mixed(x: int) -> int:
    """`_mix` of one number, taken modulo 2**64."""
    x &= _WORD
    x = (x ^ x >> 30) * _MIX_1 & _WORD
    x = (x ^ x >> 27) * _MIX_2 & _WORD
    return x ^ x >> 31


def _unit_(bits: Tensor, scratch: Tensor) -> Tensor:
    """From 64 random bits to a number in (0, 1). Overwrites both; the result lies in ``scratch``,
    which is of the same shape, because new memory takes longer than all of this."""
    # 52 bits and a half are 53 significant ones, all that a float64 has. With one more the largest
    # values would round to 1.
    bits.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    return scratch.view(torch.float64).copy_(bits).add_(0.5).mul_(2.0**-52)


def seeds_of_stream(seeds: Tensor, random_stream: int) -> Tensor:
    """Returns the seeds ``[...]`` of one of several drafters that draw for the same rows.

    Two drafters that drew with the same seeds would draw the same numbers, and what they draft
    would not be independent. Random stream 0 has the rows' own seeds. The seeds are hashed before
    the random stream is added: those of the n texts of one request may lie as far apart as two
    random streams.

    >>> seeds_of_stream(torch.tensor([7]), 0).tolist()
    [7]
    """
    if random_stream == 0:
        return seeds
    step = (random_stream * _GOLDEN + (1 << 63)) % (1 << 64) - (
        1 << 63
    )  # as a signed 64-bit integer
    return _mix(_mix(seeds) + step)


def inverse_cdf(distribution: Tensor, u: Tensor) -> Tensor:
    """Returns the index that ``u`` picks from an unnormalised distribution; never one of mass 0.

    distribution: ``[..., V]``, no mass negative and some positive; u: ``[...]`` -> int64 ``[...]``.

    >>> inverse_cdf(torch.tensor([0.0, 0.25, 0.75]), torch.tensor(0.2)).item()
    1
    """
    return Categorical.of(distribution).draw(u[..., None])[..., 0]
