"""Tiny quantised folders, written and read by the libraries that own their forms.

    python tests/owned_folders.py TRITON

writes `owned_folders.tar.xz`; TRITON is a checkout of triton, for its package triton_kernels, which
quantises gpt-oss. The other libraries are installed: gptqmodel, autoawq, compressed-tensors,
bitsandbytes, transformers. `origin.json` in the archive has their versions. gptqmodel and autoawq
want other versions of torch and transformers, but what is called here works with `--no-deps`; on
two cores, gptqmodel needs GPTQMODEL_CPU_WORKERS=2.

A form is a folder of `config.json` and `model.safetensors`, and `read.safetensors`: what the
library makes of its matrices, in the type that it computes in, or the digest of that. Nothing needs
a GPU.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as t
from safetensors.torch import load_file, save_file

ARCHIVE = Path(__file__).with_name("owned_folders.tar.xz")
GROUP = 32
Tensors = dict[str, torch.Tensor]
Write = Callable[[Path, Path], Tensors]  # plain folder, folder to write -> what the library reads
LIBRARIES = ("gptqmodel", "autoawq", "compressed-tensors", "bitsandbytes", "transformers", "torch")
_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}

# The search of AWQ wants multiples of 64 rows.
_WIDE = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}


def build(config: t.PretrainedConfig) -> torch.nn.Module:
    """Some rows have no negative weights, so that zero points of 0 occur."""
    torch.manual_seed(7)
    model: torch.nn.Module = t.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() == 1:
                continue
            if "proj" in name:
                value.normal_(std=0.05)
                value[..., ::5, :] = value[..., ::5, :].abs()
            else:  # few different numbers pack well
                value.copy_(torch.randint(-3, 4, value.shape) / 8)
    return model


def write_plain(folder: Path, **sizes: int) -> None:
    build(t.LlamaConfig(**_SIZES | sizes)).save_pretrained(folder)  # type: ignore[operator]
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(i): i for i in range(32)}, unk_token="0"))
    t.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0").save_pretrained(folder)


def matrices(model: torch.nn.Module) -> Tensors:
    return {
        key: value.detach().clone()
        for key, value in model.state_dict().items()
        if key.endswith("_proj.weight")
    }


def gptq(**options: Any) -> Write:
    """The whole of GPTQModel: calibration, packing, loading."""
    how = {"quant_method": "gptq", "group_size": GROUP, "device": "cpu"} | options
    how["offload_to_disk"] = False

    def write(plain: Path, folder: Path) -> Tensors:
        from gptqmodel import (  # type: ignore[import-not-found]
            BACKEND,
            GPTQModel,
            QuantizeConfig,
        )
        from gptqmodel.quantization.awq.utils.packing_utils import (  # type: ignore[import-not-found]
            dequantize_gemm,
        )

        if how["quant_method"] == "awq":
            write_plain(plain := folder / "plain", **_WIDE)
        rng = torch.Generator().manual_seed(1)
        texts = [torch.randint(0, 32, (1, 48), generator=rng) for _ in range(16)]
        ones = torch.ones(1, 48, dtype=torch.long)
        model = GPTQModel.load(str(plain), QuantizeConfig(**how))
        model.quantize([{"input_ids": i, "attention_mask": ones} for i in texts], batch_size=1)
        model.save(str(folder))
        half = {"device": "cpu", "dtype": torch.float16}  # as scales are stored
        loaded = GPTQModel.load(str(folder), backend=BACKEND.TORCH, **half)
        read = {}
        for name, module in loaded.model.named_modules():
            if name.endswith("_proj"):
                if how["quant_method"] == "awq":
                    parts = module.qweight, module.qzeros, module.scales
                    whole = dequantize_gemm(*parts, 4, GROUP)
                else:
                    whole = module.dequantize_weight()
                read[f"{name}.weight"] = whole.t().contiguous()
        return read

    return write


def awq(_: Path, folder: Path) -> Tensors:
    """The whole of AutoAWQ, but its kernels."""
    from awq import AutoAWQForCausalLM  # type: ignore[import-not-found]
    from awq.utils.packing_utils import dequantize_gemm  # type: ignore[import-not-found]

    write_plain(plain := folder / "plain", **_WIDE)
    model = AutoAWQForCausalLM.from_pretrained(str(plain), device_map="cpu")
    model.quantize(
        t.AutoTokenizer.from_pretrained(plain),
        quant_config={"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"},
        calib_data=[[token % 32 for token in range(at, at + 60)] for at in range(8)],
        max_calib_seq_len=64,
    )
    model.save_quantized(str(folder))
    read = {}
    for name, module in model.model.named_modules():
        if name.endswith("_proj"):
            parts = module.qweight, module.qzeros, module.scales
            read[f"{name}.weight"] = dequantize_gemm(*parts, 4, GROUP).t().contiguous()
    return read


def compressed(**weights: Any) -> Write:
    """compressed-tensors, with the minima and maxima of the weights as observed range."""

    def write(plain: Path, folder: Path) -> Tensors:
        from compressed_tensors.compressors import (  # type: ignore[import-not-found]
            ModelCompressor,
        )
        from compressed_tensors.quantization import (  # type: ignore[import-not-found]
            QuantizationConfig,
            QuantizationStatus,
            apply_quantization_config,
        )

        model = t.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        group = {"targets": ["Linear"], "weights": weights}
        config = QuantizationConfig(
            config_groups={"group_0": group},
            ignore=["lm_head"],
            quantization_status=QuantizationStatus.FROZEN,
        )
        apply_quantization_config(model, config)
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                _set_range(module, weights)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(str(folder))
        compressor.decompress_model(model)
        return matrices(model)

    return write


def _set_range(module: Any, weights: dict[str, Any]) -> None:
    """Scales and zero points by the library's own formula."""
    from compressed_tensors.quantization.utils import (  # type: ignore[import-not-found]
        calculate_qparams,
    )

    weight = module.weight.data
    rows, columns = weight.shape
    if weights["strategy"] == "block":
        down, across = weights["block_structure"]
        parts = weight.reshape(rows // down, down, columns // across, across)
        low, high = parts.amin((1, 3)), parts.amax((1, 3))
    else:
        size = {"group": GROUP, "channel": columns, "tensor": columns}[weights["strategy"]]
        parts = weight.reshape(rows, -1, size)
        low, high = parts.amin(-1), parts.amax(-1)
        if weights["strategy"] == "tensor":
            low, high = low.amin().reshape(1), high.amax().reshape(1)
    args = module.quantization_scheme.weights
    scale, zero = calculate_qparams(low, high, args)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))


def bitsandbytes(dtype: torch.dtype, **options: Any) -> Write:
    """bitsandbytes as transformers saves it."""

    def write(plain: Path, folder: Path) -> Tensors:
        from bitsandbytes import functional  # type: ignore[import-not-found]

        model = t.AutoModelForCausalLM.from_pretrained(
            plain,
            quantization_config=t.BitsAndBytesConfig(**options),
            device_map="cpu",
            dtype=dtype,
        )
        model.save_pretrained(folder)
        read = {}
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                held = module.weight
                if options.get("load_in_8bit"):
                    whole = functional.int8_vectorwise_dequant(held.data, held.SCB)
                else:  # as rows of one block each: its CPU kernel takes no block of two rows
                    shape = held.quant_state.shape
                    held.quant_state.shape = torch.Size((shape.numel() // 64, 64))
                    whole = functional.dequantize_4bit(held.data, held.quant_state).reshape(shape)
                read[f"{name}.weight"] = whole
        return read

    return write


def fp8(scale_fmt: str, block: int | None) -> Write:
    """transformers' conversions. Its `from_pretrained` quantises on GPUs only, but reads here."""

    def write(plain: Path, folder: Path) -> Tensors:
        from transformers.integrations.finegrained_fp8 import Fp8Quantize
        from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

        config = t.FineGrainedFP8Config(
            weight_block_size=block and (block, block), scale_fmt=scale_fmt
        )
        quantise = Fp8Quantize(FineGrainedFP8HfQuantizer(config))
        model = t.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        stored: Tensors = {}
        for key, value in model.state_dict().items():
            is_matrix = key.endswith("_proj.weight")
            stored |= quantise.convert({key: value}) if is_matrix else {key: value}
        model.config.save_pretrained(folder)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        about = json.loads((folder / "config.json").read_text())
        about["quantization_config"] = config.to_dict()
        (folder / "config.json").write_text(json.dumps(about))
        return matrices(t.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))

    return write


def mxfp4(_: Path, folder: Path) -> Tensors:
    """triton_kernels quantises and packs; the layout is what transformers saves, and it reads."""
    from triton_kernels.numerics_details import mxfp  # type: ignore[import-not-found]

    config = t.GptOssConfig(
        **_SIZES, num_local_experts=2, num_experts_per_tok=1, pad_token_id=None, sliding_window=9
    )
    model: Any = build(config)
    stored = {}
    for key, value in model.state_dict().items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            stored[key] = value
            continue
        packed, scales = mxfp.downcast_to_mxfp_torch(value, torch.uint8, axis=1)
        scales = scales.transpose(-1, -2).contiguous()
        packed = packed.transpose(-1, -2).reshape(*scales.shape, -1).contiguous()
        stored |= {f"{key}_blocks": packed, f"{key}_scales": scales}
    config.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    about = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    about["quantization_config"] = t.Mxfp4Config(modules_to_not_convert=skipped).to_dict()
    about["architectures"] = ["GptOssForCausalLM"]
    (folder / "config.json").write_text(json.dumps(about))
    read = t.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    return {key: read[key].clone() for key in read if key.endswith(("gate_up_proj", "down_proj"))}


_INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
_FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}
_NF4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FORMS: dict[str, Write] = {
    "gptq": gptq(bits=4),
    "gptq 8 bit": gptq(bits=8),
    "gptq 2 bit": gptq(bits=2),
    "gptq whole rows": gptq(bits=4, group_size=-1, act_group_aware=False),
    "gptq act-order": gptq(bits=4, desc_act=True, act_group_aware=False),
    "gptq 8 bit act-order": gptq(bits=8, desc_act=True, act_group_aware=False),
    "gptq asymmetric": gptq(bits=4, sym=False),
    "gptq asymmetric v2": gptq(bits=4, sym=False, format="gptq_v2"),
    "awq": awq,
    "awq by gptqmodel": gptq(bits=4, quant_method="awq", format="gemm", sym=False),
    "int4": compressed(**_INT4, symmetric=True),
    "int4 asymmetric": compressed(**_INT4, symmetric=False),
    "int8": compressed(**_INT8, symmetric=True),
    "int8 asymmetric": compressed(**_INT8, symmetric=False),
    "float8": compressed(**_FP8),
    "float8 one scale": compressed(**_FP8 | {"strategy": "tensor"}),
    "float8 blocks": compressed(**_FP8 | {"strategy": "block", "block_structure": [32, 32]}),
    "fp8 block-wise": fp8("float", 32),
    "fp8 block-wise ue8m0": fp8("ue8m0", 32),
    "fp8 one scale": fp8("float", None),
    "nf4": bitsandbytes(torch.bfloat16, **_NF4),
    "nf4 nested": bitsandbytes(torch.float32, **_NF4, bnb_4bit_use_double_quant=True),
    "nf4 in bfloat16": bitsandbytes(torch.bfloat16, **_NF4, bnb_4bit_quant_storage=torch.bfloat16),
    "fp4": bitsandbytes(torch.float16, load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "llm.int8": bitsandbytes(torch.float16, load_in_8bit=True),
    "mxfp4": mxfp4,
}


def digest(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def save_read(read: Tensors, folder: Path) -> None:
    """One matrix of a layer, and the digests of all: most of the archive would be this file."""
    stored = load_file(folder / "model.safetensors")
    for key, weight in read.items():
        as_read = key in stored and stored[key].dtype == weight.dtype
        assert not (as_read and stored[key].shape == weight.shape), f"{key} is not quantised"
    kept = {
        k: v.contiguous() for k, v in read.items() if k.endswith(("q_proj.weight", "down_proj"))
    }
    digests = {key: digest(weight) for key, weight in read.items()}
    save_file(kept, folder / "read.safetensors", digests)


def nameless(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what differs from one run to the next."""
    found = tarfile.TarInfo(member.name)
    found.size = member.size
    return found


def main(triton: Path) -> None:
    sys.path.insert(0, str(triton.resolve() / "python" / "triton_kernels"))
    os.environ |= {"TORCHDYNAMO_DISABLE": "1"}  # GPTQModel would compile what runs once
    origin = {name: importlib.metadata.version(name) for name in LIBRARIES}
    head = ["git", "-C", str(triton), "rev-parse", "HEAD"]
    origin["triton_kernels"] = subprocess.run(
        head, check=True, text=True, capture_output=True
    ).stdout.strip()
    with (
        tempfile.TemporaryDirectory() as scratch,
        tarfile.open(ARCHIVE, "w:xz", preset=9) as archive,
    ):
        os.chdir(scratch)  # where GPTQModel leaves its logs
        (place := Path(scratch) / "origin.json").write_text(json.dumps(origin, indent=1))
        archive.add(place, place.name, filter=nameless)
        write_plain(plain := Path(scratch) / "plain")
        for name, write in FORMS.items():
            (folder := Path(scratch) / name).mkdir()
            save_read(write(plain, folder), folder)
            for part in ("config.json", "model.safetensors", "read.safetensors"):
                archive.add(folder / part, f"{name}/{part}", filter=nameless)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
