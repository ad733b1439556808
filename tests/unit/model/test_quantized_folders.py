"""Quantised folders: every form is read as its definition says, and packed where that is exact.

The writers below follow the published definitions, value by value. GPTQ and AWQ: the packing loops
of their reference implementations; compressed-tensors: its README; FP8: DeepSeek-V3's
`weight_dequant`; nf4: the quantiles of the QLoRA paper with absmax of blocks. What the libraries
themselves write is in `test_owned_quantized_folders.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny_models
from family_models import FAMILY_CONFIGS
from native_models import ZOO, random_tokens
from outrider import native
from outrider.errors import ModelError
from outrider.model.checkpoints import open_checkpoint
from outrider.model.driver import Driver
from outrider.model.families import read_decoder_config
from outrider.model.load import load_model
from outrider.model.native_description import cannot_run
from outrider.model.weights import read_config

HIDDEN, INNER, GROUP = 64, 128, 32
TOKENS = random_tokens(24, 64)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Tensors = dict[str, torch.Tensor]
Written = tuple[torch.Tensor, Tensors]  # the exact weight, and the tensors after its stem


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [rows, columns] -> int32 words along the columns, lowest bits first."""
    per = 32 // bits
    rows, columns = values.shape
    out = np.zeros((rows, -(-columns // per)), np.int64)
    for c in range(columns):
        out[:, c // per] |= values[:, c].numpy().astype(np.int64) << bits * (c % per)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


def grouped(weight: torch.Tensor, bits: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Codes [N, K], zero points and half-precision scales [N, G]."""
    parts = weight.reshape(len(weight), -1, GROUP)
    if symmetric:
        zero = torch.full(parts.shape[:2], 1 << (bits - 1))
        scale = parts.abs().amax(-1) / ((1 << (bits - 1)) - 1)
    else:
        scale = (parts.amax(-1) - parts.amin(-1)) / ((1 << bits) - 1)
        zero = (-parts.amin(-1) / scale).round().long().clamp(1, (1 << bits) - 1)
    scale = scale.half()
    code = (parts / scale.float()[..., None] + zero[..., None]).round().clamp(0, (1 << bits) - 1)
    return code.long().flatten(1), zero, scale


def value(code: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, of: Any) -> torch.Tensor:
    return (code - zero[:, of]).float() * scale.float()[:, of]


def write_gptq(weight: torch.Tensor, bits: int, symmetric: bool, order: bool) -> Written:
    code, zero, scale = grouped(weight, bits, symmetric)
    of = torch.arange(weight.shape[1]) // GROUP
    if order:
        of = of[torch.randperm(len(of), generator=torch.Generator().manual_seed(1))]
    tensors = {
        ".qweight": words(code, bits).t().contiguous(),
        ".qzeros": words((zero - 1).t().contiguous(), bits),
        ".scales": scale.t().contiguous(),
        ".g_idx": of.int(),
    }
    return value(code, zero, scale, of), tensors


def write_awq(weight: torch.Tensor) -> Written:
    code, zero, scale = grouped(weight, 4, symmetric=False)

    def interleaved(columns: torch.Tensor) -> torch.Tensor:
        return words(columns.reshape(len(columns), -1, 8)[..., AWQ_ORDER].flatten(1), 4)

    tensors = {
        ".qweight": interleaved(code.t().contiguous()),
        ".qzeros": interleaved(zero.t().contiguous()),
        ".scales": scale.t().contiguous(),
    }
    return value(code, zero, scale, torch.arange(weight.shape[1]) // GROUP), tensors


def write_packed(weight: torch.Tensor, symmetric: bool, order: bool = False) -> Written:
    code, zero, scale = grouped(weight, 4, symmetric)
    of = torch.arange(weight.shape[1]) // GROUP
    tensors = {
        ".weight_packed": words(code, 4),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = words(zero.t().contiguous(), 4).t().contiguous()
    if order:
        of = of[torch.randperm(len(of), generator=torch.Generator().manual_seed(1))]
        tensors[".weight_g_idx"] = of.int()
    return value(code, zero, scale, of), tensors


def write_int8(weight: torch.Tensor) -> Written:
    scale = (weight.abs().amax(1, keepdim=True) / 127).half()
    code = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return code.float() * scale.float(), {".weight": code, ".weight_scale": scale}


def write_by_rows(weight: torch.Tensor) -> Written:
    most = weight.abs().amax(1)
    code = (weight / most[:, None] * 127).round().to(torch.int8)
    about = {".SCB": most, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return code * most[:, None] * torch.tensor(1 / 127), {".weight": code, **about}


def write_float8(weight: torch.Tensor) -> Written:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    code = (weight / scale.float()).to(torch.float8_e4m3fn)
    return code.float() * scale.float(), {".weight": code, ".weight_scale": scale}


def write_blockwise(weight: torch.Tensor) -> Written:
    rows, columns = -(-weight.shape[0] // 48), -(-weight.shape[1] // 48)
    scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(2)) + 0.5
    whole = scale.repeat_interleave(48, 0).repeat_interleave(48, 1)
    whole = whole[: weight.shape[0], : weight.shape[1]]
    code = (weight / whole).to(torch.float8_e4m3fn)
    return code.float() * whole, {".weight": code, ".weight_scale_inv": scale}


NF4 = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
NF4 += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]


def write_nf4(weight: torch.Tensor, nested: bool) -> Written:
    table = torch.tensor(NF4)
    blocks = weight.reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    tensors: Tensors = {".weight.quant_map": table}
    about: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
    if nested:
        offset, inner = float(absmax.mean()), torch.linspace(-1, 1, 256)
        outer = torch.stack([(p - offset).abs().max() for p in torch.split(absmax, 16)])
        scaled = torch.cat(
            [(p - offset) / top for p, top in zip(torch.split(absmax, 16), outer, strict=True)]
        )
        coded = (scaled[:, None] - inner).abs().argmin(1)
        absmax = torch.cat(
            [inner[c] * top for c, top in zip(torch.split(coded, 16), outer, strict=True)]
        )
        absmax = absmax + offset
        tensors |= {".weight.absmax": coded.to(torch.uint8), ".weight.nested_absmax": outer}
        tensors[".weight.nested_quant_map"] = inner
        about |= {"nested_blocksize": 16, "nested_offset": offset}
    else:
        tensors[".weight.absmax"] = absmax
    code = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1).flatten()
    tensors[".weight"] = (code[::2] << 4 | code[1::2]).to(torch.uint8)[:, None]
    state = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    tensors[".weight.quant_state.bitsandbytes__nf4"] = state
    return (table[code].reshape(-1, 64) * absmax[:, None]).reshape(weight.shape), tensors


def scheme(**weights: Any) -> dict[str, Any]:
    kind = weights.pop("format")
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


GPTQ = {"quant_method": "gptq", "group_size": GROUP}
INT4 = {"format": "pack-quantized", "num_bits": 4, "strategy": "group", "group_size": GROUP}
FORMS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Written], bool]] = {
    "gptq": (GPTQ | {"bits": 4}, lambda w: write_gptq(w, 4, True, False), True),
    "gptq 8 bit": (GPTQ | {"bits": 8}, lambda w: write_gptq(w, 8, True, False), True),
    "gptq 2 bit": (GPTQ | {"bits": 2}, lambda w: write_gptq(w, 2, False, False), False),
    "gptq asymmetric": (GPTQ | {"bits": 4}, lambda w: write_gptq(w, 4, False, False), False),
    "gptq act-order": (GPTQ | {"bits": 4}, lambda w: write_gptq(w, 4, True, True), False),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP}, write_awq, False),
    "int4": (scheme(symmetric=True, **INT4), lambda w: write_packed(w, True), True),
    "int4 asymmetric": (scheme(symmetric=False, **INT4), lambda w: write_packed(w, False), False),
    "int4 act-order": (
        scheme(symmetric=True, actorder="group", **INT4),
        lambda w: write_packed(w, True, order=True),
        False,
    ),
    "int8": (scheme(format="int-quantized", num_bits=8, strategy="channel"), write_int8, True),
    "float8": (
        scheme(format="float-quantized", num_bits=8, strategy="channel"),
        write_float8,
        False,
    ),
    "fp8 block-wise": (
        {"quant_method": "fp8", "weight_block_size": [48, 48]},
        write_blockwise,
        False,
    ),
    "llm.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, write_by_rows, False),
    "nf4": ({"quant_method": "bitsandbytes"}, lambda w: write_nf4(w, False), False),
    "nf4 nested": ({"quant_method": "bitsandbytes"}, lambda w: write_nf4(w, True), False),
}
FAMILY_FORMS = ("gptq", "awq", "int4", "int8", "float8", "fp8 block-wise", "llm.int8", "nf4")
# Fused, joined and reordered heads, experts, latent attention, recurrent layers, plain MLPs.
FAMILY_SAMPLE: tuple[str, ...] = (
    "phi3",
    "gpt_neox",
    "cohere2",
    "qwen3_moe",
    "deepseek_v3",
    "granite4",
    "gemma3n",
)
FAMILY_SAMPLE += ("falcon_h1",)  # its products are scaled


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        **tiny_models.SMALL | {"hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": 16}
    )
    return tiny_models.write(tmp_path_factory.mktemp("plain"), config)


def write_both(
    name: str,
    plain: Path,
    folder: Path,
    holds: Callable[[str, torch.Tensor], bool] = lambda key, _: key.endswith("_proj.weight"),
) -> tuple[Path, Path]:
    """The quantised folder, and one with the same weights in float32. `holds`: what to quantise."""
    folder.mkdir(exist_ok=True)
    about, write, _ = FORMS[name]
    quantised, exact = folder / "quantised", folder / "exact"
    config = json.loads((plain / "config.json").read_text())
    stored, floats = {}, {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        if not holds(key, tensor):
            stored[key] = floats[key] = tensor
            continue
        floats[key], parts = write(tensor)
        stem = key.removesuffix(".weight")
        stored |= {stem + rest: part for rest, part in parts.items()}
    for place, tensors, more in (
        (quantised, stored, {"quantization_config": about}),
        (exact, floats, {}),
    ):
        place.mkdir()
        save_file({k: t.contiguous() for k, t in tensors.items()}, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(config | more))
    return quantised, exact


@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str, plain: Path, tmp_path: Path) -> None:
    quantised, exact = write_both(name, plain, tmp_path)
    found, expected = open_checkpoint(quantised), open_checkpoint(exact)
    for key in expected.names():
        weight = load_file(exact / "model.safetensors")[key]
        assert torch.equal(found.tensor(key, weight.shape).float(), weight), key
    for backend in ("torch", "native") if native.available() else ("torch",):
        of: Any = {"backend": backend, "dtype": "float32"}
        logits = [
            Driver(load_model(place, **of)).forward({"a": TOKENS}).logits["a"]
            for place in (quantised, exact)
        ]
        assert torch.equal(*logits)


def linear_modules(folder: Path) -> Callable[[str, torch.Tensor], bool]:
    """What the libraries quantise: all linear modules but the head, where groups fit."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    linear = [k for k, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    names = {f"{key}.weight" for key in linear if not key.endswith(("lm_head", "embed_out"))}

    def holds(key: str, tensor: torch.Tensor) -> bool:
        known = key in names or re.search(r"\.experts\.\d+\.\w+\.weight$", key)
        return bool(known) and tensor.shape[1] % GROUP == 0 and tensor.shape[0] % 8 == 0

    return holds


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # GPT-BigCode's
@pytest.mark.parametrize("family", FAMILY_CONFIGS if ZOO else FAMILY_SAMPLE)
@pytest.mark.parametrize("name", FAMILY_FORMS)
def test_every_family_in_the_forms(name: str, family: str, tmp_path: Path) -> None:
    folder = tiny_models.write(tmp_path / "plain", FAMILY_CONFIGS[family])
    quantised, exact = write_both(name, folder, tmp_path, linear_modules(folder))
    runs = native.available() and not cannot_run(read_decoder_config(read_config(folder)))
    for backend in ("torch", "native") if runs else ("torch",):
        of: Any = {"backend": backend, "dtype": "float32"}
        logits = [
            Driver(load_model(place, **of)).forward({"a": TOKENS}).logits["a"].clone()
            for place in (quantised, exact)
        ]
        if backend == "native":
            assert torch.equal(*logits)
        torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)  # torch's sums vary
    if runs:  # as it is kept by default
        error_R = Driver(load_model(quantised)).forward({"a": TOKENS}).logits["a"] - logits[1]
        assert float(error_R.square().mean(1).sqrt().median() / logits[1].std()) < 0.1


@pytest.mark.skipif(not native.available(), reason=native.why_unavailable())
@pytest.mark.parametrize("name", FORMS)
def test_what_is_exact_in_blocks_stays_packed(name: str, plain: Path, tmp_path: Path) -> None:
    quantised, exact = write_both(name, plain, tmp_path)
    model: Any = load_model(quantised)
    assert model.dtype == ("packed" if FORMS[name][2] else "bfloat16")
    checkpoint: Any = open_checkpoint(quantised)
    for key, weight in load_file(exact / "model.safetensors").items():
        kind = checkpoint.kind_of(key) - native.PACKED
        if FORMS[name][2] and key.endswith("_proj.weight"):
            with checkpoint.blocks(key, weight.shape) as (blocks, _):
                found = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))
            assert torch.equal(torch.from_numpy(np.array(found)), weight), key
        else:
            assert kind < 0
    expected = Driver(load_model(exact, dtype="float32")).forward({"a": TOKENS}).logits["a"]
    error = Driver(model).forward({"a": TOKENS}).logits["a"] - expected
    assert 0 < float(error.square().mean().sqrt() / expected.std()) < 0.05


def test_heads_whose_neighbours_rotate_together(tmp_path: Path) -> None:
    """Their rows are reordered while they are read, so they are not packed as they are."""
    sizes = tiny_models.SMALL | {"hidden_size": HIDDEN, "intermediate_size": INNER}
    folder = tiny_models.write(tmp_path / "plain", transformers.CohereConfig(**sizes))
    quantised, exact = write_both("gptq", folder, tmp_path / "both")
    for dtype, tolerance in (("float32", 0.0), ("auto", 0.05)):
        logits = [
            Driver(load_model(place, dtype=dtype)).forward({"a": TOKENS}).logits["a"]
            for place in (quantised, exact)
        ]
        error = (logits[0] - logits[1]).square().mean().sqrt() / logits[1].std()
        assert error <= tolerance


def write_mxfp4(tmp_path: Path) -> tuple[Path, Path]:
    """A folder as gpt-oss has it, and the same weights in float32, by transformers' definition."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = tiny_models.SMALL | {"hidden_size": HIDDEN, "intermediate_size": GROUP}
    config = transformers.GptOssConfig(
        **sizes, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=9
    )
    exact, folder = tiny_models.write(tmp_path / "exact", config), tmp_path / "mxfp4"
    folder.mkdir()
    rng, stored = torch.Generator().manual_seed(3), {}
    floats = load_file(exact / "model.safetensors")
    for name, tensor in list(floats.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=rng, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=rng, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        floats[name] = whole.contiguous()
    save_file(stored, folder / "model.safetensors")
    save_file(floats, exact / "model.safetensors")
    about = json.loads((exact / "config.json").read_text())
    about["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(about))
    return folder, exact


def test_experts_in_the_form_of_gpt_oss(tmp_path: Path) -> None:
    folder, exact = write_mxfp4(tmp_path)
    logits = {}
    for place in (folder, exact):
        for backend in ("torch", "native"):
            model = load_model(place, backend=backend, dtype="float32")
            logits[place, backend] = Driver(model).forward({"a": TOKENS}).logits["a"].clone()
    for backend in ("torch", "native"):
        assert torch.equal(logits[folder, backend], logits[exact, backend])
    packed: Any = load_model(folder)
    assert packed.dtype == "packed"
    error = Driver(packed).forward({"a": TOKENS}).logits["a"] - logits[exact, "native"]
    assert 0 < float(error.std() / logits[exact, "native"].std()) < 0.05
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({k: t for k, t in tensors.items() if not k.endswith("down_proj_scales")}, path)
    with pytest.raises(ModelError, match=r"lacks the tensor .*down_proj_scales"):
        load_model(folder)


def test_what_is_not_read_is_named(plain: Path, tmp_path: Path) -> None:
    quantised, _ = write_both("gptq", plain, tmp_path)
    path = quantised / "config.json"
    config = json.loads(path.read_text())
    for change, line in (
        ({"quant_method": "quip"}, "quantised by 'quip', not gptq"),
        ({"bits": 3}, "GPTQ with 3 bits"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ of version 'gemv'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4"}, "of the format 'nvfp4'"),
        ({"bits": 8}, "has shape|does not fit together"),
    ):
        changed = config["quantization_config"] | change
        path.write_text(json.dumps(config | {"quantization_config": changed}))
        with pytest.raises(ModelError, match=line) as caught:
            load_model(quantised, backend="torch")
        assert "\n" not in str(caught.value)
