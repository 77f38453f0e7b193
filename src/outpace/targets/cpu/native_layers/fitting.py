"""Checks whether the native library can compute a decoder layer of a given description."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.errors import ConfigError
from outpace.targets.cpu.native import BLOCK_INPUTS, Native
from outpace.targets.cpu.native_layers.blocks import NativeBlockLinear
from outpace.targets.cpu.native_layers.description import LayerDescription
from outpace.targets.cpu.native_layers.experts import experts_fit
from outpace.targets.cpu.native_layers.probing import is_plain
from outpace.targets.cpu.native_layers.product import weight_of
from outpace.targets.cpu.native_layers.recurrence import recurrence_fits

MOST_HEADS_PER_KV = 64
"""Query heads that may share a key head."""


def check_lanes(layers: Sequence[LayerDescription], library: Native, lanes: int) -> None:
    """Raises ``ConfigError`` for layers of a model that was saved on a processor with vectors of
    another length, where its sizes do not fit those of this one."""
    if lanes != library.lanes and not all(fits(layer, library) for layer in layers):
        raise ConfigError(
            "this model was saved on a processor with shorter vectors, and layers of its sizes "
            "cannot be computed here by outpace's own CPU kernels: load the model from its folder "
            "instead."
        )


def fits(found: LayerDescription, library: Native) -> bool:
    """Returns whether the library can compute a layer of these sizes and dtypes: it makes room for
    these shapes, and for nothing wider."""
    gate, up, down = found.linears[4:7]
    if not all(linear is None or linear.fits for linear in found.linears):
        return False
    hidden, inner = found.hidden, 0 if up is None else up.outputs
    return (
        all(
            linear is None or linear.module.in_features == size
            for linear, size in zip(found.linears, _input_sizes(found, inner), strict=True)
        )
        and all(linear is None or linear.outputs == hidden for linear in (found.made(3), down))
        and (found.mixture is None or _fits_mixture(found, library.lanes))
        and (found.sinks is None or (is_plain(found.sinks) and found.sinks.shape == (found.heads,)))
        and (gate is None or gate.outputs == inner)
        and all(size % library.lanes == 0 for size in (hidden, inner))
        and _fits_attention(found, library)
        and all(
            norm is None or norm.module.weight.numel() == size
            for norm, size in zip(
                (*found.norms, found.embedding_norm), (*_norm_sizes(found), hidden), strict=True
            )
        )
    )


def _input_sizes(found: LayerDescription, inner: int) -> list[int]:
    """The inputs of each linear layer."""
    hidden, latent, first = found.hidden, found.latent, found.linears[7]
    if latent is None:
        read = 2 * hidden if found.reads_embeddings else hidden
        heads = [read, read, read, found.width]
    else:
        from_ = hidden if first is None else first.outputs
        heads = [from_, hidden, latent.size, latent.heads * latent.value]
    return [*heads, hidden, hidden, inner, hidden, 0 if latent is None else latent.nope]


def _fits_attention(found: LayerDescription, library: Native) -> bool:
    """Whether attention, or what keeps a state in its place, is as the library knows it."""
    if found.recurrence is not None:
        inputs = {linear.module.in_features for linear in found.recurrence.products}
        fitting = recurrence_fits(found.recurrence, library.lanes)
        return fitting and inputs == {found.hidden} and found.recurrence.width == found.width
    return (_fits_heads if found.latent is None else _fits_latents)(found, library)


def _fits_heads(found: LayerDescription, library: Native) -> bool:
    """Whether queries, keys and values are of heads as the library knows them."""
    query, key, value = (found.made(number).outputs for number in range(3))
    return (
        query == (2 * found.width if found.gated_heads else found.width)
        and not (found.gated_heads and found.norm_over_heads)
        and found.dim % library.lanes == 0
        and key == value
        and key % found.dim == 0
        and found.width % key == 0
        and found.width // key <= MOST_HEADS_PER_KV
    )


def _fits_latents(found: LayerDescription, library: Native) -> bool:
    """The same where heads see latents."""
    query, key, value = (found.made(number) for number in range(3))
    latent, (first, keys) = found.latent, found.linears[7:]
    assert latent is not None
    # What the parts of a head begin with, they begin a panel with.
    parts = [(value, latent.value), *([(value, latent.nope)] if keys is None else [])]
    parts += [] if keys is None else [(keys, latent.size)]
    held = [(weight_of(linear.module), size) for linear, size in parts]
    return (
        latent.fits(library.lanes)
        and query.outputs == latent.heads * latent.query
        and key.outputs == latent.size + latent.rope
        and value.outputs == sum(size for linear, size in parts if linear is value) * latent.heads
        and (keys is None or keys.outputs == latent.heads * latent.size)
        and all(weight.bias is None and size % weight.panel == 0 for weight, size in held)
        and (first is None or first.outputs % library.lanes == 0)
        # The transposed product of blocks writes whole ones.
        and (not isinstance(value.module, NativeBlockLinear) or latent.size % BLOCK_INPUTS == 0)
    )


def _fits_mixture(found: LayerDescription, lanes: int) -> bool:
    """Whether a mixture is of the layer's size, and the MLP that all tokens meet of its kind."""
    assert found.mixture is not None
    shared = found.linears[4:7]
    alike = all(each is not None and isinstance(each.module, NativeBlockLinear) for each in shared)
    experts = found.mixture.experts
    fitting = experts.hidden_dim == found.hidden and experts_fit(experts, lanes)
    return fitting and (alike or shared == (None,) * 3)


def _norm_sizes(found: LayerDescription) -> list[int]:
    """The weights that the library reads of each norm."""
    if found.latent is not None:
        first = found.linears[7]
        return [found.hidden] * 4 + [0 if first is None else first.outputs, found.latent.size]
    if found.recurrence is not None:
        return [found.hidden] * 4 + [0, 0]
    of_heads = [found.width, found.made(1).outputs]
    alone = not (found.norm_over_heads or found.norm_stride)
    return [found.hidden] * 4 + ([found.dim] * 2 if alone else of_heads)
