"""The K/V of a compact decoder: [2, slots, K, D] of each layer that has its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.model.attention import Index, RoundedKV, Stored, rounded
from outrider.model.families.description import DecoderConfig

# One tensor of all layers if their heads are alike.
Layers = torch.Tensor | list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class RoundedStore:
    """K/V in int8, with a scale for each slot and head: [2, slots, K, 1] of each layer."""

    data: Layers
    scales: Layers


Store = Layers | RoundedStore


def make_store(
    config: DecoderConfig,
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rounds: bool = False,
) -> Store:
    """Zeros; K and D are those of each layer."""
    sizes = _sizes(config)
    if not rounds:
        return _zeros(sizes, num_slots, dtype, device)
    scales = _zeros([(heads, 1) for heads, _ in sizes], num_slots, torch.float32, device)
    return RoundedStore(_zeros(sizes, num_slots, torch.int8, device), scales)


def rounded_bytes(config: DecoderConfig) -> int:
    """Of a token in a `RoundedStore`, with its id where there are recurrent layers."""
    sizes = sum(2 * heads * (dim + 4) for heads, dim in _sizes(config))
    return sizes + 4 * bool(config.mixer)


def write(store: Store, layer: int, slots: Index, new_2TKD: torch.Tensor) -> None:
    """Stores the new tokens' keys and values of a layer."""
    if not isinstance(store, RoundedStore):
        _put(store[layer], slots, new_2TKD)
        return
    for part, new in zip((store.data, store.scales), rounded(new_2TKD), strict=True):
        _put(part[layer], slots, new)


def keys_and_values(store: Store, layer: int, dtype: torch.dtype) -> tuple[Stored, Stored]:
    """Those of a layer, of all slots, for attention in `dtype`."""
    if not isinstance(store, RoundedStore):
        return store[layer][0], store[layer][1]
    data, scales = store.data[layer], store.scales[layer]
    return RoundedKV(data[0], scales[0], dtype), RoundedKV(data[1], scales[1], dtype)


def move_slots(store: Store, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies slots; all sources are read before any target is written."""
    if isinstance(store, RoundedStore):
        move_slots(store.data, source, target)
        move_slots(store.scales, source, target)
    elif isinstance(store, torch.Tensor):
        store.index_copy_(2, target, store.index_select(2, source))
    else:
        for one in store:
            one.index_copy_(1, target, one.index_select(1, source))


def _sizes(config: DecoderConfig) -> list[tuple[int, int]]:
    """K and D of each layer that has keys and values of its own."""
    layers = [config.of_layer(i) for i in range(config.num_layers) if config.has_kv(i)]
    return [(layer.num_kv_heads, layer.head_dim) for layer in layers]


def _zeros(
    sizes: list[tuple[int, int]], num_slots: int, dtype: torch.dtype, device: torch.device
) -> Layers:
    if len(set(sizes)) > 1:
        return [torch.zeros(2, num_slots, *size, dtype=dtype, device=device) for size in sizes]
    shape = (len(sizes), 2, num_slots, *(sizes or [(1, 1)])[0])
    return torch.zeros(shape, dtype=dtype, device=device)


def _put(store_2SKD: torch.Tensor, slots: Index, new_2TKD: torch.Tensor) -> None:
    if isinstance(slots, slice):
        store_2SKD[:, slots] = new_2TKD
    else:
        store_2SKD.index_copy_(1, slots, new_2TKD)
