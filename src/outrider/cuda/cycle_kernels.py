"""The Triton kernels of a speculative cycle: draws, layouts of passes, verdicts.

Shape legend: S sequences, M tokens of each, K drafts of each, V vocabulary, L places of a line.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.cuda.kernels import enter


@triton.jit
def _mix(x):
    """The output function of SplitMix64; see `outrider.noise`."""
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
    """Rounds both logarithms from float64, as the native engine does: the same float32."""
    u = uniform(key, index).to(tl.float64)
    near = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))  # instead of log(1 - u)
    wait = tl.where(u < 1e-4, near, -tl.log(1.0 - u)).to(tl.float32)
    return (-tl.log(wait.to(tl.float64))).to(tl.float32)


@triton.jit(do_not_specialize=["EVERY"])
def draw_kernel(
    logits, temperatures, keys, best, found, V, STRIDE, EVERY,
    BV: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The RANKS best tokens of one part of a row by logits / T + gumbel, best first.

    Among equal scores the lowest id wins. A NaN ranks above every number, so that it is found.
    """
    enter(PDL)
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
    """Picks the best token of all parts of a row, and the next RANKS - 1."""
    enter(PDL)
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
    """Lays out a pass over M tokens of each sequence's line, starting at OFFSET.

    `line` holds the last two committed tokens, then the drafts, then OTHERS runners-up of each
    draft; `lengths` counts the committed tokens.
    """
    enter(PDL)
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
    # A row with a NaN drew -1; the pass must still read a valid token id.
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
    """The verdict: keeps drafts while they equal the target's draws, then one more draw.

    If that draw is among the runners-up, the draw after it is kept as well, and `moves` gets the
    slots from and to which keys and values are copied. `report` gets the number of emitted tokens,
    then K + 1 draws that begin with these, then the row of the accepted runner-up, or 0.
    """
    enter(PDL)
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
        after = tl.load(draws + row, hit > 0, 0)
        tl.store(moves + 2 * s, tl.load(slots + row, hit > 0, -1))
        tl.store(moves + 2 * s + 1, tl.load(slots + s * M + accepted + 1, hit > 0, -1))
        drawn = tl.where((hit > 0) & (j == accepted + 1), after, drawn)
        before = tl.where(hit > 0, last, before)
        last = tl.where(hit > 0, after, last)
    tl.store(report + s * (K + 3), accepted + 1 + hit)
    tl.store(report + s * (K + 3) + 1 + j, drawn, j <= K)
    tl.store(report + s * (K + 3) + K + 2, runner_up)
    tl.debug_barrier()  # all threads have read the line
    tl.store(line + s * L, before)
    tl.store(line + s * L + 1, last)
    tl.store(lengths + s, tl.load(lengths + s) + accepted + 1 + hit)


@triton.jit
def follow_kernel(
    report, lengths, secrets, tables, tokens, positions, slots, contexts, ends, masks, keys,
    sources, VERIFIED, W, M: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Lays out a head's pass over the emitted tokens of a verdict, at the end of M rows.

    `sources` gets, for each token, the row of the verified pass (VERIFIED rows a sequence) with the
    features that the head reads; `lengths` counts the rows in the head's KV.
    """
    enter(PDL)
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
    tl.debug_barrier()  # all threads have read the length
    tl.store(lengths + s, length + count)


@triton.jit
def move_kernel(store, moves, SLOTS, SIZE, BS: tl.constexpr, PDL: tl.constexpr):
    """Copies the keys, or values, of one layer from slot to slot: SIZE numbers each."""
    enter(PDL)
    source = tl.load(moves + 2 * tl.program_id(0)).to(tl.int64)
    target = tl.load(moves + 2 * tl.program_id(0) + 1).to(tl.int64)
    base = store + tl.program_id(1).to(tl.int64) * SLOTS * SIZE
    i = tl.arange(0, BS)
    inside = (i < SIZE) & (source >= 0)
    tl.store(base + target * SIZE + i, tl.load(base + source * SIZE + i, inside), inside)
