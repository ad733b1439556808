"""The Triton kernels. `triton_ops` launches them; `ops` says what each computes.

All of them write each element by one fixed sum: no atomics on numbers, and nothing in the order
of a row's additions depends on how many rows there are or how long the others are. A row of a
verifying pass is therefore bit for bit what a plain step computes, as long as both take the same
tile sizes.

PDL (programmatic dependent launch): a kernel is started while the one before it still runs, and
waits in `gdc_wait` for its results.

Shape legend: T tokens, N outputs, K inputs of a matmul; S sequences, M tokens of each, G query
heads per key/value head, D head size; V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _enter(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _finish_linear(
    acc, up, scale, bias, out, rows, columns, T, N,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """What follows the sums: scale, bias, SwiGLU, residual; then the store."""
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

    GATED: weight holds gates, then ups. SCALED: weights are int8, each row times its scale; they
    are exact in x's type. SPLIT programs share a tile's k; the last to arrive adds their parts in
    order.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tl.arange(0, BT)
    columns = tile * BN + tl.arange(0, BN)
    share = tl.cdiv(tl.cdiv(K, SPLIT), BK) * BK
    first = split * share
    last = tl.minimum(first + share, K)
    # 64-bit: a head of 128k rows by 16k columns has more weights than 2^31.
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
        gdc_launch_dependents()  # not before: programs that wait would crowd a few processors

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
    _enter(PDL)
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
    """One token's one head: norm of query or key, rope in place, key or value to its slot.

    Pairs lie side by side. Slot -1: the row is padding and leaves no trace in the store.
    """
    _enter(PDL)
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
            # The norm's result is rounded as a separate operation would.
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

    A row sees slots below the context and those new tokens whose bit its mask has. Which keys a
    program takes, and in which order, depends on their slots alone. A runner-up has programs of
    its own, to which its key lies where that of the draft it stands in for does.
    """
    _enter(PDL)
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
        own_slot = tl.maximum(tl.load(slots + alone), 0)  # nobody has slot -1
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
    """One query head of one token: the parts of its attention put together."""
    _enter(PDL)
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


@triton.jit
def _mix(x):
    """SplitMix64's output function; see `outrider.noise`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(key, index):
    """u(index) of `outrider.noise`, bit for bit."""
    bits = _mix(key + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 32
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return tl.minimum(u, 0.999999940395355225)  # 1 - 2^-24


@triton.jit
def _gumbel(key, index):
    """Both logarithms rounded from float64, as the native engine does: the same float32."""
    u = uniform(key, index).to(tl.float64)
    near = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))  # 1 - u is inexact there
    wait = tl.where(u < 1e-4, near, -tl.log(1.0 - u)).to(tl.float32)
    return (-tl.log(wait.to(tl.float64))).to(tl.float32)


@triton.jit(do_not_specialize=["EVERY"])
def draw_kernel(
    logits, temperatures, keys, best, found, V, STRIDE, EVERY,
    BV: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best of one part of a row: argmax(logits / T + gumbel), the lowest id among equals.

    RANKS of them, best first.

    A NaN is better than everything, so that it is found.
    """
    _enter(PDL)
    draw = tl.program_id(0)
    part = tl.program_id(1)
    row = (draw + 1) * EVERY - 1
    temperature = tl.load(temperatures + draw)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    i = part * BV + tl.arange(0, BV)
    score = tl.load(logits + row.to(tl.int64) * STRIDE + i, i < V, float("-inf"))
    if temperature > 0:
        score = tl.div_rn(score, temperature + tl.zeros((BV,), tl.float32)) + _gumbel(key, i)
        score = tl.where(i < V, score, float("-inf"))
    broken = score != score
    any_broken = tl.max(broken.to(tl.int32), 0) > 0
    score = tl.where(broken, float("inf"), score)
    at = (draw * PARTS + part) * RANKS
    for rank in tl.static_range(RANKS):
        top = tl.max(score, 0)
        first = tl.min(tl.where(score == top, i, 2147483647), 0)
        tl.store(best + at + rank, top)
        tl.store(found + at + rank, tl.where(any_broken, -1, first))
        score = tl.where(i == first, float("-inf"), score)


@triton.jit
def pick_kernel(
    best, found, tokens, others, STRIDE, OTHERS_STRIDE,
    PARTS: tl.constexpr, RANKS: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best of all parts of a row, and the RANKS - 1 that come next."""
    _enter(PDL)
    draw = tl.program_id(0)
    part = tl.arange(0, BP)
    inside = part < PARTS * RANKS
    top = tl.load(best + draw * PARTS * RANKS + part, inside, float("-inf"))
    index = tl.load(found + draw * PARTS * RANKS + part, inside, 2147483647)
    for rank in tl.static_range(RANKS):
        highest = tl.max(top, 0)
        first = tl.min(tl.where(top == highest, index, 2147483647), 0)
        if rank == 0:
            tl.store(tokens + draw * STRIDE, first)
        else:
            tl.store(others + draw * OTHERS_STRIDE + rank - 1, first)
        top = tl.where(index == first, float("-inf"), top)


@triton.jit(do_not_specialize=["OFFSET"])
def place_kernel(
    line, lengths, secrets, tables, tokens, positions, slots, contexts, ends, masks, keys,
    OFFSET, L, W, M: tl.constexpr, CHAIN: tl.constexpr, OTHERS: tl.constexpr, BM: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Lays out a pass over M tokens of each sequence's line, from OFFSET on.

    `line` holds the last two committed tokens, then drafts, then OTHERS runners-up of each;
    `lengths` counts the committed ones.
    """
    _enter(PDL)
    s = tl.program_id(0)
    j = tl.arange(0, BM)
    inside = j < M
    start = tl.load(lengths + s) - 2 + OFFSET
    depth = j
    if OTHERS:
        depth = tl.where(j < CHAIN, j, tl.maximum(j - CHAIN, 0) // OTHERS + 1)
    position = start + depth
    slot = start + j
    at = s * M + j
    # A row that is not a number drew -1: the pass under way must not fall over it.
    token = tl.maximum(tl.load(line + s * L + OFFSET + j, inside, 0), 0)
    tl.store(tokens + at, token, inside)
    tl.store(positions + at, position, inside)
    page = tl.load(tables + s * W + slot // PAGE, inside & (slot // PAGE < W), -1)
    tl.store(slots + at, tl.where(page < 0, -1, page * PAGE + slot % PAGE), inside)
    tl.store(masks + at, (tl.full((BM,), 2, tl.int64) << depth.to(tl.int64)) - 1, inside)
    secret = tl.load(secrets + s).to(tl.uint64, bitcast=True)
    key = _mix(secret + (position + 1).to(tl.uint64))
    tl.store(keys + at, key.to(tl.int64, bitcast=True), inside)
    tl.store(contexts + s, start)
    tl.store(ends + s, start + CHAIN)


@triton.jit
def settle_kernel(
    line, lengths, draws, slots, report, moves, L, M: tl.constexpr, K: tl.constexpr,
    OTHERS: tl.constexpr, BK: tl.constexpr, BO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The verdict: keeps drafts while they equal the target's draws, then one draw more.

    One more still where that draw is among the runners-up: then `moves` says which slot's keys
    and values belong where. `report` gets how many tokens were emitted, then K + 1 draws of which
    those are the first, then which row was a runner-up among them, or 0.
    """
    _enter(PDL)
    s = tl.program_id(0)
    j = tl.arange(0, BK)
    drawn = tl.load(draws + s * M + j, j <= K, -2)
    draft = tl.load(line + s * L + 2 + j, j < K, -3)
    accepted = tl.min(tl.where(draft == drawn, K, j), 0)
    last = tl.sum(tl.where(j == accepted, drawn, 0), 0)
    before = tl.load(line + s * L + 1 + accepted)
    hit = 0
    runner_up = 0
    if OTHERS:
        e = tl.arange(0, BO)
        inside = (e < OTHERS) & (accepted < K)
        other = tl.load(line + s * L + 2 + K + accepted * OTHERS + e, inside, -3)
        which = tl.min(tl.where(other == last, e, BO), 0)
        hit = (which < BO).to(tl.int32)
        runner_up = hit * (1 + K + accepted * OTHERS + which)
        row = s * M + runner_up
        behind = tl.load(draws + row, hit > 0, 0)
        tl.store(moves + 2 * s, tl.load(slots + row, hit > 0, -1))
        tl.store(moves + 2 * s + 1, tl.load(slots + s * M + accepted + 1, hit > 0, -1))
        drawn = tl.where((hit > 0) & (j == accepted + 1), behind, drawn)
        before = tl.where(hit > 0, last, before)
        last = tl.where(hit > 0, behind, last)
    tl.store(report + s * (K + 3), accepted + 1 + hit)
    tl.store(report + s * (K + 3) + 1 + j, drawn, j <= K)
    tl.store(report + s * (K + 3) + K + 2, runner_up)
    tl.debug_barrier()  # everybody has read the line
    tl.store(line + s * L, before)
    tl.store(line + s * L + 1, last)
    tl.store(lengths + s, tl.load(lengths + s) + accepted + 1 + hit)


@triton.jit
def follow_kernel(
    report, lengths, secrets, tables, tokens, positions, slots, contexts, ends, masks, keys,
    sources, VERIFIED, W, M: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Lays out a head's pass over the tokens that a verdict emitted, at the end of M rows.

    `sources`: the rows of the pass that was judged, VERIFIED of each sequence, whose states these
    tokens follow; `lengths` counts the rows that the head has.
    """
    _enter(PDL)
    s = tl.program_id(0)
    j = tl.arange(0, BM)
    inside = j < M
    count = tl.load(report + s * (M + 2))
    runner_up = tl.load(report + s * (M + 2) + M + 1)
    length = tl.load(lengths + s)
    order = j - M + count
    real = inside & (order >= 0)
    order = tl.maximum(order, 0)
    position = length + order
    at = s * M + j
    token = tl.load(report + s * (M + 2) + 1 + order, real, 0)
    first = tl.load(report + s * (M + 2) + 1)
    tl.store(tokens + at, tl.maximum(tl.where(real, token, first), 0), inside)
    tl.store(positions + at, position, inside)
    page = tl.load(tables + s * W + position // PAGE, real & (position // PAGE < W), -1)
    tl.store(slots + at, tl.where(page < 0, -1, page * PAGE + position % PAGE), inside)
    mask = (tl.full((BM,), 2, tl.int64) << order.to(tl.int64)) - 1
    tl.store(masks + at, tl.where(real, mask, 0), inside)
    secret = tl.load(secrets + s).to(tl.uint64, bitcast=True)
    key = _mix(secret + (position + 1).to(tl.uint64))
    tl.store(keys + at, key.to(tl.int64, bitcast=True), inside)
    judged = tl.where((runner_up > 0) & (order == count - 1), runner_up, order)
    tl.store(sources + at, s * VERIFIED + judged, inside)
    tl.store(contexts + s, length)
    tl.store(ends + s, length + count)
    tl.debug_barrier()  # everybody has read the length
    tl.store(lengths + s, length + count)


@triton.jit
def move_kernel(store, moves, SLOTS, SIZE, BS: tl.constexpr, PDL: tl.constexpr):
    """Keys, or values, of one layer from one slot to another; SIZE numbers each."""
    _enter(PDL)
    source = tl.load(moves + 2 * tl.program_id(0)).to(tl.int64)
    target = tl.load(moves + 2 * tl.program_id(0) + 1).to(tl.int64)
    base = store + tl.program_id(1).to(tl.int64) * SLOTS * SIZE
    i = tl.arange(0, BS)
    inside = (i < SIZE) & (source >= 0)
    tl.store(base + target * SIZE + i, tl.load(base + source * SIZE + i, inside), inside)
