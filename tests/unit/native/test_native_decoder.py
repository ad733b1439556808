"""The native step against transformers and the torch decoder, on every instruction set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny_models
from native_models import ISAS, ODD, batch_of, needs_native, random_tokens
from outrider import native
from outrider.contracts import Model, StepBatch
from outrider.errors import ConfigError, ModelError, UnknownName
from outrider.model.capabilities import DraftsInOneCall
from outrider.model.driver import Driver
from outrider.model.native_decoder import NativeDecoder
from outrider.model.torch_decoder import TorchDecoder
from outrider.noise import mix
from outrider.sampling import RowDraws, RowParams, SamplingParams, draw_tokens
from tiny_models import logits, reference, worst, write

pytestmark = needs_native
TOKENS = random_tokens(48, 64)

CONFIGS = tiny_models.CONFIGS | {"llama odd sizes": transformers.LlamaConfig(**ODD)}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that are multiples of nothing, grouped heads, biases."""
    config = transformers.LlamaConfig(**ODD, attention_bias=True)
    return write(tmp_path_factory.mktemp("odd"), config)


@pytest.mark.parametrize("name", CONFIGS)
def test_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIGS[name])
    expected = logits(reference(folder), TOKENS)
    driver = Driver(NativeDecoder.load(folder), seed=1)
    assert worst(driver.forward({"a": TOKENS}).logits["a"], expected) < 1e-4
    got = []
    for piece in (TOKENS[:19], TOKENS[19:20], TOKENS[20:25], TOKENS[25:]):
        got.append(driver.forward({"b": piece}).logits["b"])
        driver.keep("b", range(len(piece)))
    assert worst(torch.cat(got), expected) < 1e-4


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str, odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    assert native.isa() == isa
    tokens = random_tokens(70, ODD["vocab_size"])
    expected = logits(reference(odd), tokens)
    driver = Driver(NativeDecoder.load(odd), block_size=5, seed=3)
    assert worst(driver.forward({"a": tokens}).logits["a"], expected) < 1e-4
    driver.keep("a", range(50))
    assert worst(driver.forward({"a": tokens[50:]}).logits["a"], expected[50:]) < 1e-4


def representable(weight: torch.Tensor, dtype: str) -> torch.Tensor:
    """The nearest weights that quantising does not change."""
    out = weight.clone()
    size, deepest, highest = (weight.shape[1], 127, 127) if dtype == "int8" else (64, 8, 7)
    for start in range(0, weight.shape[1], size):
        group = weight[:, start : start + size]
        top = group.gather(1, group.abs().argmax(1, keepdim=True))
        step = top / -deepest
        out[:, start : start + size] = (group / step).round().clamp(-deepest, highest) * step
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integer_weights(
    isa: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights that are integers already, only the rounding of activations remains."""
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    config = transformers.LlamaConfig(
        **ODD | {"hidden_size": 210, "intermediate_size": 300, "num_hidden_layers": 1}
    )
    folder = write(tmp_path, config)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "embed" not in name:
            tensors[name] = representable(tensor, dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = random_tokens(40, ODD["vocab_size"])
    expected = logits(reference(folder), tokens)
    got = Driver(NativeDecoder.load(folder, dtype=dtype)).forward({"a": tokens}).logits["a"]
    error = (got - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error < 0.03


def test_integer_sums_are_the_same_on_every_instruction_set(
    odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """avx512 and avx2 do the same float operations in the same order, so all bits agree."""
    fused = [isa for isa in ISAS if isa != "portable"]
    tokens = random_tokens(30, ODD["vocab_size"])
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        results = []
        for isa in fused:
            monkeypatch.setenv("OUTRIDER_ISA", isa)
            model = NativeDecoder.load(odd, dtype=dtype)
            results.append(Driver(model).forward({"a": tokens}).logits["a"])
        assert all(torch.equal(results[0], other) for other in results[1:])


def test_bfloat16_storage_loses_nothing(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**ODD)
    folder = write(tmp_path, config, dtype=torch.bfloat16)
    tokens = random_tokens(30, ODD["vocab_size"])
    kept = NativeDecoder.load(folder, dtype="float32")
    weights = load_file(folder / "model.safetensors")
    save_file({k: w.float() for k, w in weights.items()}, folder / "model.safetensors")
    widened = NativeDecoder.load(folder, dtype="float32")
    assert kept.weight_bytes < 0.6 * widened.weight_bytes
    a, b = (Driver(m).forward({"a": tokens}).logits["a"] for m in (kept, widened))
    assert torch.equal(a, b)


def test_auto_is_the_stored_type(tmp_path: Path) -> None:
    folder = write(tmp_path, transformers.LlamaConfig(**ODD), dtype=torch.bfloat16)
    tokens = random_tokens(30, ODD["vocab_size"])
    auto, named = NativeDecoder.load(folder), NativeDecoder.load(folder, dtype="bfloat16")
    assert auto.dtype == "bfloat16"
    a, b = (Driver(m).forward({"a": tokens}).logits["a"] for m in (auto, named))
    assert torch.equal(a, b)


def test_bfloat16_by_name_rounds_what_it_multiplies(tmp_path: Path) -> None:
    """Products round, sums do not: nearer to the truth than everything in bfloat16."""
    folder = write(tmp_path, transformers.LlamaConfig(**ODD), dtype=torch.bfloat16)
    tokens = random_tokens(40, ODD["vocab_size"])

    def of(model: Model) -> torch.Tensor:
        return Driver(model).forward({"a": tokens}).logits["a"]

    truth = of(NativeDecoder.load(folder, dtype="float32"))
    rounded = of(NativeDecoder.load(folder, dtype="bfloat16"))
    everything = of(TorchDecoder.load(folder, dtype=torch.bfloat16)).float()
    error = float((rounded - truth).pow(2).mean())
    assert 0.0 < error < float((everything - truth).pow(2).mean())


def test_what_is_not_finite_stays_so(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding to bfloat16 must not carry a NaN into a number."""
    checkpoint = load_file(odd / "model.safetensors")
    for isa in ISAS:
        monkeypatch.setenv("OUTRIDER_ISA", isa)
        model = NativeDecoder.load(odd, dtype="bfloat16")
        for pattern in (0x7FFFFFFF, 0x7F800001, -1):
            embedding = checkpoint["model.embed_tokens.weight"].float().clone()
            embedding.view(torch.int32)[3] = pattern
            model.set_tensor(0, 0, embedding)
            logits_TV = Driver(model).forward({"a": [1, 3]}).logits["a"]
            assert torch.isfinite(logits_TV[0]).all()
            assert torch.isnan(logits_TV[1]).all()


def test_float16_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path, transformers.LlamaConfig(**ODD), dtype=torch.float16)
    model = NativeDecoder.load(folder)
    assert model.dtype == "float32"
    tokens = random_tokens(30, ODD["vocab_size"])
    expected = Driver(TorchDecoder.load(folder)).forward({"a": tokens}).logits["a"]
    assert worst(Driver(model).forward({"a": tokens}).logits["a"], expected) < 1e-4


def test_taps_and_exit(odd: Path) -> None:
    tokens = random_tokens(20, ODD["vocab_size"])
    ours, theirs = Driver(NativeDecoder.load(odd)), Driver(TorchDecoder.load(odd))
    a = ours.forward({"a": tokens, "b": tokens[:3]}, taps=(0, 1, 2), exit_layer=2)
    b = theirs.forward({"a": tokens, "b": tokens[:3]}, taps=(0, 1, 2), exit_layer=2)
    for name in "ab":
        assert worst(a.logits[name], b.logits[name]) < 1e-4
        for layer in (0, 1, 2):
            assert worst(a.taps[layer][name], b.taps[layer][name]) < 1e-4


def test_only_the_rows_asked_for(odd: Path) -> None:
    """Rows that nobody asked for are dropped early; the others do not notice."""
    tokens = random_tokens(40, ODD["vocab_size"])
    model = NativeDecoder.load(odd)
    driver = Driver(model)
    every = driver.forward({"a": tokens, "b": tokens[:9]}).logits
    batch = driver.batch({"a": tokens, "b": tokens[:9]})
    batch.logit_rows_R = np.array([48, 3, 4, 3, 39], np.int32)
    got = model.forward(batch).logits_RV
    expected = torch.stack([every["b"][8], *(every["a"][i] for i in (3, 4, 3, 39))])
    assert torch.equal(got, expected)
    batch.logit_rows_R = np.array([], np.int32)
    assert model.forward(batch).logits_RV.shape == (0, ODD["vocab_size"])


def test_draws_in_the_pass_are_those_from_its_logits(odd: Path) -> None:
    """Greedy and filtered rows in one pass; and again where the rotary table had to grow."""
    tokens = random_tokens(40, ODD["vocab_size"])
    model = NativeDecoder.load(odd)
    driver = Driver(model)
    batch = driver.batch({"a": tokens, "b": tokens[:9]})
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.7, top_p=0.8, min_p=0.01, top_k=20),
    ]
    rows = RowParams.of(params, [9, 20, 20])
    keys = [0] * 9 + [mix(i) for i in range(40)]
    batch.draws = RowDraws([0, 9, 29], rows, keys)
    for shift in (0, 4000):
        batch.positions_T = batch.positions_T + np.int32(shift)
        output = model.forward(batch)
        assert output.draws == draw_tokens(output.logits_RV, rows, keys)
        assert max(output.draws) < model.spec.num_tokens
    batch.draws = None
    assert model.forward(batch).draws is None


def test_long_positions_extend_the_rotary_table(odd: Path) -> None:
    ours, theirs = NativeDecoder.load(odd), TorchDecoder.load(odd)
    results = []
    for model in (ours, theirs):
        model.allocate(8, 4)
        batch = batch_of([5, 6, 7], context=0, width=8)
        batch.positions_T = np.array([4000, 4001, 4002], np.int32)
        results.append(model.forward(batch).logits_RV.clone())
    assert worst(*results) < 1e-3


def test_copy_slots(odd: Path) -> None:
    """A swap: all sources are read before any target is written."""
    model = NativeDecoder.load(odd)
    model.allocate(8, 4)
    tokens = random_tokens(6, ODD["vocab_size"])
    model.forward(batch_of(tokens, context=0, width=8))
    probe = batch_of([9], context=6, width=8)
    before = model.forward(probe).logits_RV.clone()
    slots = np.arange(6, dtype=np.int32)
    model.copy_slots(slots, slots[::-1] + 20)  # slot i to 25 - i
    model.copy_slots(slots, slots[::-1].copy())
    assert not torch.equal(model.forward(probe).logits_RV, before)
    model.copy_slots(slots[::-1] + 20, slots)
    assert torch.equal(model.forward(probe).logits_RV, before)


def test_allocate_empties_the_store(odd: Path) -> None:
    model = NativeDecoder.load(odd)
    model.allocate(4, 4)
    batch = batch_of([1, 2, 3], context=0, width=4)
    first = model.forward(batch).logits_RV.clone()
    model.allocate(2, 16)
    batch = batch_of([1, 2, 3], context=0, width=1)
    assert torch.equal(model.forward(batch).logits_RV, first)


def test_describes_itself(odd: Path) -> None:
    model = NativeDecoder.load(odd)
    assert isinstance(model, DraftsInOneCall)
    theirs = TorchDecoder.load(odd).spec
    for name in (
        "vocab_size",
        "num_tokens",
        "num_layers",
        "hidden_size",
        "num_parameters",
        "eos_ids",
        "max_positions",
    ):
        assert getattr(model.spec, name) == getattr(theirs, name)
    assert model.load_s > 0
    assert model.weight_bytes > 0


def change(batch: StepBatch, **fields: Any) -> StepBatch:
    for name, value in fields.items():
        setattr(batch, name, np.array(value, np.int32))
    return batch


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens_T": [1, 77, 2]}, "token id"),
        ({"tokens_T": [1, -1, 2]}, "token id"),
        ({"positions_T": [0, -1, 2]}, "position"),
        ({"positions_T": [0, 1, 1 << 30]}, "position"),
        ({"positions_T": [0, 1]}, "fit together"),
        ({"starts_S1": [0, 2]}, "starts"),
        ({"starts_S1": [1, 3]}, "starts"),
        ({"starts_S1": [0, 4, 3], "context_S": [0, 0], "tables_SW": [[0], [1]]}, "starts"),
        ({"context_S": [-1]}, "context"),
        ({"context_S": [30]}, "block table"),
        ({"context_S": [2**31 - 2]}, "block table"),
        ({"tables_SW": [[8, 1]]}, "block"),
        ({"tables_SW": [[-1, 1]]}, "block"),
        ({"tables_SW": [0, 1]}, "fit together"),
        ({"logit_rows_R": [3]}, "logit row"),
        ({"logit_rows_R": [-1]}, "logit row"),
        ({"parents_T": [-1, 1, 0]}, "parent"),
        ({"parents_T": [-2, 0, 0]}, "parent"),
        ({"parents_T": [-1, 0]}, "fit together"),
    ],
)
def test_bad_batches_are_refused(odd: Path, fields: dict[str, Any], message: str) -> None:
    model = NativeDecoder.load(odd)
    model.allocate(8, 4)
    good = model.forward(batch_of([1, 2, 3], context=0, width=2)).logits_RV.clone()
    with pytest.raises(ValueError, match=message):
        model.forward(change(batch_of([1, 2, 3], context=0, width=2), **fields))
    assert torch.equal(model.forward(batch_of([1, 2, 3], context=0, width=2)).logits_RV, good)


def test_other_misuse(odd: Path) -> None:
    model = NativeDecoder.load(odd)
    batch = batch_of([1], context=0, width=1)
    with pytest.raises(ValueError, match="allocate"):
        model.forward(batch)
    with pytest.raises(ValueError, match="block"):
        model.allocate(0, 16)
    model.allocate(2, 4)
    batch.exit_layer = 9
    with pytest.raises(ValueError, match="exit"):
        model.forward(batch)
    batch.exit_layer, batch.taps = 1, (2,)
    with pytest.raises(ValueError, match="taps"):
        model.forward(batch)
    with pytest.raises(ValueError, match="slot"):
        model.copy_slots(np.array([0], np.int32), np.array([8], np.int32))
    with pytest.raises(UnknownName, match="dtype"):
        NativeDecoder.load(odd, dtype="int3")
    with pytest.raises(ConfigError, match="threads"):
        NativeDecoder.load(odd, threads=0)


def test_unknown_instruction_set(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ISA", "mmx")
    with pytest.raises(ConfigError, match="OUTRIDER_ISA"):
        NativeDecoder.load(odd)


def test_truncated_checkpoint(odd: Path, tmp_path: Path) -> None:
    for file in odd.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError):
        NativeDecoder.load(tmp_path)
