"""Every kernel against plain torch on fresh random inputs: on the GPU, or interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.contracts import Stream
from outrider.cuda.ops import Pass, TorchOps
from outrider.cuda.tiles import Shape, Tiles, fitting, usual_tiles
from outrider.cuda.triton_ops import TritonOps
from outrider.model.int8 import round_rows
from outrider.noise import as_signed, draw_key, gumbel, uniforms_numpy
from outrider.sampling import RowParams, SamplingParams, draw_tokens

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter lacks the first


@pytest.fixture
def random() -> torch.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return torch.Generator(DEVICE).manual_seed(seed)


def normal(
    random: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.randn(*shape, generator=random, device=DEVICE).to(dtype)


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert not out.isnan().any()
    error = (out.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-9)
    assert error < (2e-6 if dtype is torch.float32 else 1e-2), float(error)


@pytest.mark.parametrize("num_tokens", range(1, 17))
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_product(random: torch.Generator, num_tokens: int, dtype: torch.dtype) -> None:
    ops = TritonOps(DEVICE, tiles={Shape(40, 72): Tiles(16, 32, 2)})
    ops.reserve(16, 4, 16, 64, 64)
    x = normal(random, num_tokens, 72, dtype=dtype)
    weight = normal(random, 40, 72, dtype=dtype)
    bias = normal(random, 40, dtype=dtype)
    residual = normal(random, num_tokens, 40, dtype=dtype)
    out = residual.clone()
    ops.linear(x, weight, out, bias_N=bias, add=True)
    exact = residual.double() + x.double() @ weight.double().t() + bias.double()
    close(out, exact, dtype)
    again = residual.clone()
    ops.linear(x, weight, again, bias_N=bias, add=True)
    assert torch.equal(out, again)


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 33])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(48, 64), (30, 50)])
def test_norm_and_product(
    random: torch.Generator,
    num_tokens: int,
    gated: bool,
    dtype: torch.dtype,
    num_outputs: int,
    num_inputs: int,
) -> None:
    ops = TritonOps(DEVICE)
    ops.reserve(num_tokens, 1, 16, num_outputs, 16)
    x = normal(random, num_tokens, num_inputs, dtype=dtype)
    norm = normal(random, num_inputs, dtype=dtype)
    normed = torch.full_like(x, torch.nan)
    ops.norm(x, norm, 1e-5, normed)
    close(normed, torch.nn.functional.rms_norm(x.double(), norm.shape, norm.double(), 1e-5), dtype)
    weight = normal(random, num_outputs * (1 + gated), num_inputs, dtype=dtype)
    out = torch.full((num_tokens, num_outputs), torch.nan, dtype=dtype, device=DEVICE)
    ops.linear(normed, weight, out, gated=gated)
    exact = torch.empty_like(out, dtype=torch.float64)
    TorchOps().linear(normed.double(), weight.double(), exact, gated=gated)
    close(out, exact, dtype)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(48, 64), (30, 50)])
def test_product_by_rounded_weights(
    random: torch.Generator,
    num_tokens: int,
    gated: bool,
    dtype: torch.dtype,
    num_outputs: int,
    num_inputs: int,
) -> None:
    """Against float64 on the weights that the rounded ones stand for."""
    shape = Shape(num_outputs, num_inputs, gated, True)
    ops = TritonOps(DEVICE, tiles={shape: Tiles(16, 32, 1 if gated else 2)})
    ops.reserve(num_tokens, 1, 16, num_outputs, 16)
    x = normal(random, num_tokens, num_inputs, dtype=dtype)
    true = normal(random, num_outputs * (1 + gated), num_inputs) * normal(random, num_inputs)
    true[3] = 0.0
    weight, scale = round_rows(true)
    assert ((weight * scale[:, None] - true).abs() <= scale[:, None] * 0.5001).all()
    assert weight.abs().amax(1).tolist() == [127] * 3 + [0] + [127] * (len(true) - 4)
    bias = normal(random, len(true), dtype=dtype)
    residual = normal(random, num_tokens, num_outputs, dtype=dtype)
    out, exact = residual.clone(), residual.double()
    ops.linear(x, weight, out, scale_N=scale, bias_N=bias, gated=gated, add=True)
    TorchOps().linear(
        x.double(), weight, exact, scale_N=scale, bias_N=bias.double(), gated=gated, add=True
    )
    close(out, exact, dtype)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(random: torch.Generator, rounded: bool) -> None:
    ops = TritonOps(DEVICE)
    ops.reserve(16, 1, 16, 32, 16)
    x, weight = normal(random, 16, 64), normal(random, 32, 64)
    scale = None
    if rounded:
        weight, scale = round_rows(weight)
    whole = torch.empty(16, 32, device=DEVICE)
    ops.linear(x, weight, whole, scale_N=scale)
    for num_tokens in range(1, 16):
        part = torch.empty(num_tokens, 32, device=DEVICE)
        ops.linear(x[:num_tokens], weight, part, scale_N=scale)
        assert torch.equal(part, whole[:num_tokens])


def tree_masks(widths: list[int], width: int) -> torch.Tensor:
    """Random trees: a node sees itself and its ancestors."""
    masks = torch.zeros(len(widths), width, dtype=torch.int64)
    for s, count in enumerate(widths):
        for j in range(count):
            parent = int(torch.randint(-1, j, ())) if j else -1
            masks[s, j] = (1 << j) | (int(masks[s, parent]) if parent >= 0 else 0)
    return masks.reshape(-1)


def random_pass(contexts: list[int], widths: list[int], width: int, page: int) -> tuple[Pass, int]:
    """Scattered pages, trees of different sizes; returns also the number of slots."""
    lengths = [context + count for context, count in zip(contexts, widths, strict=True)]
    num_pages = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(num_pages) + 3)
    tables = torch.full((len(contexts), max(num_pages) + 1), -1, dtype=torch.int32)
    slots = torch.full((len(contexts), width), -1, dtype=torch.int32)
    for s, count in enumerate(num_pages):
        tables[s, :count], order = order[:count], order[count:]
        for j in range(widths[s]):
            slot = contexts[s] + j
            slots[s, j] = tables[s, slot // page] * page + slot % page
    tensors = (
        torch.zeros(len(contexts) * width, dtype=torch.int32),
        torch.randint(0, 90, (len(contexts) * width,), dtype=torch.int32),
        slots.reshape(-1),
        tree_masks(widths, width),
        torch.tensor(contexts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        tables,
    )
    where = Pass(len(contexts), width, *(t.to(DEVICE) for t in tensors))
    return where, (sum(num_pages) + 3) * page


LAYOUTS = [
    # contexts, real widths, width, page
    ([0], [1], 1, 16),
    ([15, 16], [1, 1], 1, 16),
    ([31, 0, 64], [5, 3, 1], 5, 16),
    ([63, 65], [16, 2], 16, 16),
    ([7, 130, 1], [3, 4, 4], 4, 8),
]


HEADS = [(2, 1, 16), (1, 4, 32), (1, 3, 24)]
EVERYTHING = [(*layout, *heads) for layout in LAYOUTS for heads in HEADS]
SOME = [(*layout, *HEADS[i % 3]) for i, layout in enumerate(LAYOUTS)]  # interpreting is slow


@pytest.mark.parametrize(
    ("contexts", "widths", "width", "page", "num_kv", "group", "dim"),
    EVERYTHING if DEVICE.type == "cuda" else SOME,
)
def test_attention(
    random: torch.Generator,
    contexts: list[int],
    widths: list[int],
    width: int,
    page: int,
    num_kv: int,
    group: int,
    dim: int,
) -> None:
    where, num_slots = random_pass(contexts, widths, width, page)
    num_tokens, num_q = len(contexts) * width, group * num_kv
    qkv = normal(random, num_tokens, num_q + 2 * num_kv, dim)
    store = normal(random, 2, num_slots, num_kv, dim)
    ops = TritonOps(DEVICE)
    ops.key_block = 16 if DEVICE.type == "cpu" else 64
    ops.reserve(num_tokens, num_q, dim, 16, 16)
    out = torch.full((num_tokens, num_q, dim), torch.nan, device=DEVICE)
    ops.attend(qkv, store, where, page, out)
    exact = torch.empty_like(out, dtype=torch.float64)
    TorchOps().attend(qkv.double(), store.double(), where, page, exact)
    real = (where.slots_T >= 0).cpu()
    close(out[real], exact[real], torch.float32)
    assert not out.isnan().any()


def test_attention_does_not_depend_on_the_width(random: torch.Generator) -> None:
    """A chain's rows, one pass at a time, are bit for bit those of one wide pass."""
    num_kv, group, dim, page, context = 1, 2, 16, 16, 29
    wide, num_slots = random_pass([context], [16], 16, page)
    wide.masks_T.copy_((2 << torch.arange(16)) - 1)
    qkv = normal(random, 16, (group + 2) * num_kv, dim)
    store = normal(random, 2, num_slots, num_kv, dim)
    ops = TritonOps(DEVICE)
    ops.reserve(16, group * num_kv, dim, 16, 16)
    whole = torch.empty(16, group * num_kv, dim, device=DEVICE)
    ops.attend(qkv, store, wide, page, whole)
    for j in range(0, 16, 1 if DEVICE.type == "cuda" else 5):
        one, _ = random_pass([context + j], [1], 1, page)
        one.tables_SW = wide.tables_SW
        out = torch.empty(1, group * num_kv, dim, device=DEVICE)
        ops.attend(qkv[j : j + 1], store, one, page, out)
        assert torch.equal(out[0], whole[j])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("num_kv", "group", "dim"), [(2, 1, 16), (1, 4, 24)])
def test_rope_and_store(
    random: torch.Generator, normed: bool, dtype: torch.dtype, num_kv: int, group: int, dim: int
) -> None:
    where, num_slots = random_pass([31, 0], [3, 1], 3, 16)
    num_heads = (group + 2) * num_kv
    qkv = normal(random, 6, num_heads, dim, dtype=dtype)
    q_norm = normal(random, dim, dtype=dtype) if normed else None
    k_norm = normal(random, dim, dtype=dtype) if normed else None
    angles = torch.rand(90, dim // 2, generator=random, device=DEVICE) * 7
    turns = angles.cos(), angles.sin()
    store = normal(random, 2, num_slots, num_kv, dim, dtype=dtype)
    expected, expected_store = qkv.clone(), store.clone()
    TritonOps(DEVICE).rope(qkv, q_norm, k_norm, 1e-5, turns, where, store)
    TorchOps().rope(expected, q_norm, k_norm, 1e-5, turns, where, expected_store)
    close(qkv[:, : group * num_kv], expected[:, : group * num_kv], dtype)
    close(store, expected_store, dtype)
    untouched = torch.ones(num_slots, dtype=torch.bool, device=DEVICE)
    untouched[where.slots_T[where.slots_T >= 0].long()] = False
    assert torch.equal(store[:, untouched], expected_store[:, untouched])


def test_draws(random: torch.Generator) -> None:
    """The same tokens as the reference; a NaN is reported; padding ids are never drawn."""
    ops, num_tokens = TritonOps(DEVICE), 5000
    ops.reserve(6, 1, 16, 16, 5120)
    logits = normal(random, 6, 5120) * 3
    logits[:, num_tokens:] = 100.0
    logits[4, 17] = torch.nan
    logits[5, [7, 4500]] = 50.0  # a tie: the lower id
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0, 0.0], device=DEVICE)
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    keys = as_signed([draw_key(seed, 0, i, Stream.TARGET) for i in range(6)], DEVICE)
    out, expected = (torch.full((6,), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    ops.draw(logits, num_tokens, temperature, keys, out)
    TorchOps().draw(logits, num_tokens, temperature, keys, expected)
    assert out.tolist() == expected.tolist()
    fine = [0, 1, 2, 3, 5]
    rows = RowParams.of(
        [SamplingParams(temperature=float(t)) for t in temperature[fine]], [1] * len(fine)
    )
    true = logits[fine, :num_tokens].cpu().contiguous()
    unsigned = [int(key) % (1 << 64) for key in keys[fine]]
    assert out[fine].tolist() == draw_tokens(true, rows, unsigned)  # the CPU's own
    assert out[4] == -1
    assert out[5] == 7
    first = torch.full_like(out, -7)
    both = [torch.full((6, 4), -7, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    ops.draw(logits, num_tokens, temperature, keys, first, others=both[0][:, 1:3])
    TorchOps().draw(logits, num_tokens, temperature, keys, expected, others=both[1][:, 1:3])
    assert first.tolist() == out.tolist()
    assert both[0][fine].tolist() == both[1][fine].tolist()
    assert both[0][5, 1] == 4500
    last = torch.full((2, 3), -7, dtype=torch.int32, device=DEVICE)
    ops.draw(logits, num_tokens, temperature[[2, 5]], keys, last[:, 1], every=3)
    assert last[:, 1].tolist() == [out[2], out[5]]
    assert last[:, [0, 2]].eq(-7).all()


def test_noise_has_the_same_bits() -> None:
    """Logits of -T * gumbel make every score zero, up to the last bits of two logarithms."""
    key = draw_key(3, 1, 77, Stream.TARGET)
    size = 4096
    noise = gumbel([key], size, DEVICE)
    ops = TritonOps(DEVICE)
    ops.reserve(1, 1, 16, 16, size)
    ones = torch.ones(1, device=DEVICE)
    drawn = torch.empty(1, dtype=torch.int32, device=DEVICE)
    ops.draw(-noise, size, ones, as_signed([key], DEVICE), drawn)
    # Had one of them another uniform, it would stand out by far more than rounding.
    assert float(ops.best_scores[0]) < 4e-6
    smallest = int(uniforms_numpy(key, size).argmin())
    ops.draw(torch.zeros(1, size, device=DEVICE), size, ones, as_signed([key], DEVICE), drawn)
    assert drawn.item() == smallest


def test_runners_up_have_the_bits_of_the_chain(random: torch.Generator) -> None:
    """Attention of a runner-up is what it were if that token had been drafted."""
    num_kv, group, dim, page, context = 1, 2, 16, 4, 14
    wide, num_slots = random_pass([context], [7], 7, page)
    wide.num_others = 1
    assert wide.chain == 4
    depth = torch.tensor([0, 1, 2, 3, 1, 2, 3])
    wide.masks_T.copy_((2 << depth) - 1)
    wide.lengths_S.fill_(context + 4)
    qkv = normal(random, 7, (group + 2) * num_kv, dim)
    store = normal(random, 2, num_slots, num_kv, dim)
    for ops in (TritonOps(DEVICE), TorchOps()):
        if isinstance(ops, TritonOps):
            ops.reserve(16, group * num_kv, dim, 16, 16)
        out = torch.empty(7, group * num_kv, dim, device=DEVICE)
        ops.attend(qkv, store, wide, page, out)
        for row in range(4, 7):
            swapped, place = store.clone(), wide.slots_T[depth[row]]
            swapped[:, place] = store[:, wide.slots_T[row]]
            one, _ = random_pass([context + int(depth[row])], [1], 1, page)
            one.tables_SW = wide.tables_SW
            alone = torch.empty(1, group * num_kv, dim, device=DEVICE)
            ops.attend(qkv[row : row + 1], swapped, one, page, alone)
            assert torch.equal(alone[0], out[row])


@pytest.mark.parametrize("num_others", [0, 2])
def test_layout_and_verdict_on_the_device(num_others: int) -> None:
    """Place, settle and move against torch, for every number of accepted drafts."""
    page, num_drafts = 4, 3
    width = 1 + num_drafts * (1 + num_others)
    where, _ = random_pass([9, 2, 30, 5], [1] * 4, width, page)
    where.num_others = num_others
    where.tables_SW = torch.arange(4 * 12, dtype=torch.int32, device=DEVICE).view(4, 12)
    line = torch.tensor([[1, 2, 3, 4, 5, 13, 9, 14, 8, 15, 7]] * 4, dtype=torch.int32)
    line = line[:, : 1 + width].contiguous().to(DEVICE)
    draws = torch.tensor(
        [[3, 4, 5, 6], [9, 4, 5, 6], [3, 9, 5, 6], [3, 4, 7, 6]], dtype=torch.int32
    )
    behind = torch.arange(30, 30 + 4 * (width - 4), dtype=torch.int32).view(4, -1)
    draws = torch.cat([draws, behind], 1).to(DEVICE)
    lengths = torch.tensor([9, 2, 30, 5], dtype=torch.int32, device=DEVICE)
    secrets = as_signed([3, 1 << 63, (1 << 64) - 1, 12345], DEVICE)
    store = torch.randn(2, 2, 48 * page, 1, 3, device=DEVICE)
    results = []
    for ops in (TritonOps(DEVICE), TorchOps()):
        keys = torch.zeros(4 * width, dtype=torch.int64, device=DEVICE)
        mine, counted, moved = line.clone(), lengths.clone(), store.clone()
        report = torch.zeros(4, num_drafts + 3, dtype=torch.int32, device=DEVICE)
        moves = torch.full((4, 2), -1, dtype=torch.int32, device=DEVICE)
        ops.place(mine, counted, secrets, 1, page, where, keys)
        laid = [
            t.clone()
            for t in (where.tokens_T, where.positions_T, where.slots_T, where.masks_T,
                      where.contexts_S, where.lengths_S)
        ]  # fmt: skip
        ops.settle(mine, counted, draws, where, report, moves)
        ops.move(moved, moves)
        results.append([*laid, keys, mine, counted, moves, moved, report])
    for ours, reference in zip(*results, strict=True):
        assert torch.equal(ours, reference)
    *_, mine, counted, moves, moved, report = results[0]
    if not num_others:
        assert report[:, 0].tolist() == [4, 1, 2, 3]
        assert mine[:2, :2].tolist() == [[5, 6], [2, 9]]
        return
    # Drafts 3, 4, 5 with runners-up (13, 9), (14, 8), (15, 7): the second and the fourth are hit.
    assert report.tolist() == [
        [4, 3, 4, 5, 6, 0],
        [2, 9, 37, 5, 6, 5],
        [2, 3, 9, 5, 6, 0],
        [4, 3, 4, 7, 53, 9],
    ]
    assert mine[:, :2].tolist() == [[5, 6], [9, 37], [3, 9], [7, 53]]
    slots = results[0][2].view(4, width)
    assert moves.tolist() == [
        [-1, -1],
        [slots[1, 5], slots[1, 1]],
        [-1, -1],
        [slots[3, 9], slots[3, 3]],
    ]
    assert torch.equal(moved[:, :, slots[3, 3]], store[:, :, slots[3, 9]])
    assert int((moved != store).any(-1).any(-1).any(0).any(0).sum()) == 2


def test_tiles_fit_the_memory_there_is() -> None:
    """Sizes of real kernels, as the compiler reports them for Hopper."""
    wide = Tiles(64, 512, 2, 4, 3)
    assert fitting(wide, 16, False, 2, 232448) == (512, 3)
    assert fitting(wide, 64, False, 2, 232448) == (256, 3)  # 512: 393216 bytes
    assert fitting(Tiles(128, 128, 1, 4, 3), 64, True, 2, 232448) == (64, 3)  # 128: 245760
    assert fitting(wide, 16, False, 4, 101376) == (128, 3)
    assert fitting(Tiles(128, 128, 1, 4, 3), 16, True, 4, 49152) == (32, 2)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("hidden", "heads", "vocabulary"), [(192, 5, 8192), (512, 12, 16384)])
def test_there_is_room_for_the_parts_of_every_product(
    hidden: int, heads: int, vocabulary: int, rounded: bool
) -> None:
    """Small models too, whose heads are wider than they are."""
    ops, num_tokens = TritonOps(DEVICE), 64
    ops.reserve(num_tokens, heads, 64, max(hidden, 64 * heads), vocabulary)
    for outputs in (hidden, 64 * heads, vocabulary):
        for inputs in (hidden, 3 * hidden):
            tiles = usual_tiles(Shape(outputs, inputs, rounded=rounded))
            need = tiles.split * -(-outputs // tiles.rows) * tiles.rows * num_tokens
            assert tiles.split == 1 or need <= len(ops.partial_sums)
