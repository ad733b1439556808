"""The Triton kernels of a model's layers. `triton_ops` launches them; `ops` says what they compute.

Every element is written by one fixed sum: there are no atomics on numbers, and the order of a
row's additions depends neither on the number of rows nor on the length of other sequences. A row of
a verifying pass therefore equals a plain step's row bit for bit, if both use the same tile sizes.

PDL (programmatic dependent launch): a kernel starts while the previous one still runs, and waits
for its results in `gdc_wait`.

Shape legend: T tokens, N outputs, K inputs of a matmul; S sequences, M tokens of each, G query
heads per key/value head, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def enter(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _finish_linear(
    acc, up, scale, bias, out, rows, columns, T, N,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Applies scale, bias, SwiGLU and residual to the sums, then stores them."""
    inside = (rows < T)[:, None] & (columns < N)[None, :]
    if SCALED:
        acc *= tl.load(scale + columns, columns < N, 0.0)[None, :]
        if GATED:
            up *= tl.load(scale + N + columns, columns < N, 0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + N + columns, columns < N, 0.0).to(tl.float32)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    place = out + rows[:, None] * N + columns[None, :]
    if ADD:
        acc += tl.load(place, inside, 0.0).to(tl.float32)
    tl.store(place, acc.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["T"])  # one program for all widths: the same bits
def linear_kernel(
    x, weight, scale, bias, out, partial, arrived, T, N, K,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[t, n] (+)= sum_k x[t, k] weight[n, k], every weight read once for all rows.

    GATED: `weight` holds gates, then ups. SCALED: weights are int8, and each row is multiplied by
    its scale; int8 values are exact in x's type. SPLIT programs share the inputs of a tile; the
    last one to finish adds their partial sums in order.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tl.arange(0, BT)
    columns = tile * BN + tl.arange(0, BN)
    share = tl.cdiv(tl.cdiv(K, SPLIT), BK) * BK
    first = split * share
    last = tl.minimum(first + share, K)
    # 64-bit: an output head of 128k rows by 16k columns has more than 2^31 weights.
    at_weight = weight + columns.to(tl.int64)[:, None] * K
    if PDL:
        gdc_wait()

    acc = tl.zeros((BT, BN), tl.float32)
    up = tl.zeros((BT, BN), tl.float32)
    for start in range(first, last, BK):
        k = start + tl.arange(0, BK)
        if EVEN:
            a = tl.load(x + rows[:, None] * K + k[None, :], (rows < T)[:, None], 0.0)
            w = tl.load(at_weight + k[None, :], eviction_policy="evict_first")
        else:
            a = tl.load(x + rows[:, None] * K + k[None, :], (rows < T)[:, None] & (k < last), 0.0)
            keep = (columns < N)[:, None] & (k < last)[None, :]
            w = tl.load(at_weight + k[None, :], keep, 0)
        acc = tl.dot(a, tl.trans(w).to(a.dtype), acc, input_precision=PRECISION)
        if GATED:
            if EVEN:
                w = tl.load(
                    at_weight + N.to(tl.int64) * K + k[None, :], eviction_policy="evict_first"
                )
            else:
                w = tl.load(at_weight + N.to(tl.int64) * K + k[None, :], keep, 0)
            up = tl.dot(a, tl.trans(w).to(a.dtype), up, input_precision=PRECISION)
    if PDL:
        gdc_launch_dependents()  # late: waiting programs would fill a few processors

    if SPLIT == 1:
        _finish_linear(
            acc, up, scale, bias, out, rows, columns, T, N, GATED, ADD, BIAS, SCALED
        )  # fmt: skip
    else:
        tl.static_assert(not GATED, "only plain products are split")
        area = tl.arange(0, BT)[:, None] * BN + tl.arange(0, BN)[None, :]
        part = partial + tile * SPLIT * BT * BN + area
        tl.store(part + split * BT * BN, acc)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if before == SPLIT - 1:
            acc = tl.zeros((BT, BN), tl.float32)
            for i in range(SPLIT):
                acc += tl.load(part + i * BT * BN, cache_modifier=".cg")
            _finish_linear(
                acc, up, scale, bias, out, rows, columns, T, N, GATED, ADD, BIAS, SCALED
            )  # fmt: skip
            tl.store(arrived + tile, 0)


@triton.jit
def norm_kernel(x, norm, out, H, eps, BH: tl.constexpr, PDL: tl.constexpr):
    """RMSNorm of one row."""
    enter(PDL)
    row = tl.program_id(0).to(tl.int64) * H
    h = tl.arange(0, BH)
    wide = tl.load(x + row + h, h < H, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / H + eps)
    factor = tl.load(norm + h, h < H, 0.0).to(tl.float32)
    tl.store(out + row + h, (wide * scale * factor).to(out.dtype.element_ty), h < H)


@triton.jit
def rope_kernel(
    qkv, q_norm, k_norm, cosine, sine, positions, slots, keys, values, eps,
    QUERIES: tl.constexpr, KVS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token: norm of query or key, rope in place, key or value to its slot.

    The two numbers of a rope pair are neighbours. Slot -1: the row is padding and is not stored.
    """
    enter(PDL)
    token = tl.program_id(0)
    head = tl.program_id(1)
    at = qkv + (token * (QUERIES + 2 * KVS) + head) * D
    pair = tl.arange(0, BD // 2)
    inside = pair < D // 2
    even = tl.load(at + 2 * pair, inside, 0.0)
    odd = tl.load(at + 2 * pair + 1, inside, 0.0)
    slot = tl.load(slots + token).to(tl.int64)
    if head < QUERIES + KVS:
        a = even.to(tl.float32)
        b = odd.to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / D + eps)
            norm = q_norm if head < QUERIES else k_norm
            # Rounded here, as a separate norm operation would round its result.
            a *= scale * tl.load(norm + 2 * pair, inside, 0.0).to(tl.float32)
            b *= scale * tl.load(norm + 2 * pair + 1, inside, 0.0).to(tl.float32)
            a = a.to(even.dtype).to(tl.float32)
            b = b.to(even.dtype).to(tl.float32)
        turn = tl.load(positions + token).to(tl.int64) * (D // 2) + pair
        c = tl.load(cosine + turn, inside, 0.0)
        s = tl.load(sine + turn, inside, 0.0)
        even = (a * c - b * s).to(even.dtype)
        odd = (a * s + b * c).to(even.dtype)
    if head < QUERIES:
        tl.store(at + 2 * pair, even, inside)
        tl.store(at + 2 * pair + 1, odd, inside)
    else:
        store = keys if head < QUERIES + KVS else values
        place = store + (slot * KVS + (head - QUERIES) % KVS) * D
        tl.store(place + 2 * pair, even, inside & (slot >= 0))
        tl.store(place + 2 * pair + 1, odd, inside & (slot >= 0))


@triton.jit
def attend_kernel(
    qkv, keys, values, tables, contexts, lengths, masks, slots, sums, tops, W, scale,
    M: tl.constexpr, CHAIN: tl.constexpr, OTHERS: tl.constexpr, G: tl.constexpr,
    KVS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    PAGE: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sequence, one key/value head, every SPLITS-th block of its keys.

    A row sees the slots below the context, and the new tokens whose bits its mask has. Which keys a
    program reads, and in which order, depends on their slots only. Each runner-up has programs of
    its own, in which its key takes the place of the key of the draft that it stands in for.
    """
    enter(PDL)
    sequence = tl.program_id(0) // (1 + M - CHAIN)
    head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.arange(0, BR)
    token = sequence * M + row // G
    real = row < CHAIN * G
    context = tl.load(contexts + sequence)
    length = tl.load(lengths + sequence)
    if OTHERS:
        other = tl.program_id(0) % (1 + M - CHAIN) - 1
        depth = tl.maximum(other, 0) // OTHERS + 1
        alone = sequence * M + CHAIN + tl.maximum(other, 0)
        own_slot = tl.maximum(tl.load(slots + alone), 0)  # slot -1 is padding
        token = tl.where(other >= 0, alone, token)
        real = row < tl.where(other >= 0, G, CHAIN * G)
        length = tl.where(other >= 0, context + depth + 1, length)
        replaced = tl.where(other >= 0, context + depth, -1)
    d = tl.arange(0, BD)
    at = (token * ((G + 2) * KVS) + (row % G) * KVS + head) * D
    q = tl.load(qkv + at[:, None] + d[None, :], real[:, None] & (d < D)[None, :], 0.0)
    mask = tl.load(masks + token, real, 0)
    top = tl.full((BR,), float("-inf"), tl.float32)
    weight = tl.zeros((BR,), tl.float32)
    acc = tl.zeros((BR, BD), tl.float32)
    for block in range(split, tl.cdiv(length, BL), SPLITS):
        slot = block * BL + tl.arange(0, BL)
        known = slot < length
        page = tl.maximum(tl.load(tables + sequence * W + slot // PAGE, known, 0), 0).to(tl.int64)
        place = page * PAGE + slot % PAGE
        if OTHERS:
            place = tl.where(slot == replaced, own_slot, place)
        place = (place * KVS + head) * D
        here = known[:, None] & (d < D)[None, :]
        k = tl.load(keys + place[:, None] + d[None, :], here, 0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        new = tl.maximum(slot - context, 0)
        own = (mask[:, None] >> tl.minimum(new, 63).to(tl.int64)[None, :]) & 1
        seen = known[None, :] & ((slot < context)[None, :] | (own != 0))
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(score - base[:, None])
        fade = tl.exp(top - base)
        weight = weight * fade + tl.sum(p, 1)
        v = tl.load(values + place[:, None] + d[None, :], here, 0.0)
        acc = acc * fade[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        top = higher
    part = ((token * G + row % G) * KVS + head) * SPLITS + split
    tl.store(sums + part[:, None] * (D + 1) + d[None, :], acc, real[:, None] & (d < D)[None, :])
    tl.store(sums + part * (D + 1) + D, weight, real)
    tl.store(tops + part, top, real)


@triton.jit
def combine_kernel(
    sums, tops, out, D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One query head of one token: combines the partial results of its attention."""
    enter(PDL)
    head = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, BD)
    top = tl.load(tops + head * SPLITS + split)
    highest = tl.max(top)
    fade = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    at = sums + (head * SPLITS + split) * (D + 1)
    weight = tl.sum(fade * tl.load(at + D))
    parts = tl.load(at[:, None] + d[None, :], (d < D)[None, :], 0.0)
    acc = tl.sum(parts * fade[:, None], 0) / tl.where(weight > 0, weight, 1.0)
    tl.store(out + head * D + d, acc.to(out.dtype.element_ty), d < D)
