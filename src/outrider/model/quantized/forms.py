"""How each form stores a matrix: its parts -> integer codes, zero points and scales.

Shape legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outrider.errors import ModelError

# The four-bit columns of an AWQ word, lowest bits first.
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(slots=True)
class Matrix:
    """weight[n, k] = scale[n, g] * (code[n, k] - zero[n, g]) for k in group g of `group` inputs.

    Codes are integers, or numbers that multiply a scale as they are. `group_of_K` is given where
    groups are not consecutive. Scales of `by_rows` rows are stored once.
    """

    code_NK: torch.Tensor
    scale_NG: torch.Tensor  # N or 1 or N / by_rows rows
    zero_NG: torch.Tensor | None = None
    group_of_K: torch.Tensor | None = None
    by_rows: int = 1
    group: int = 0  # inputs of a group; 0: as many as divide K evenly
    bits: int = 8  # of codes that are integers

    def groups(self) -> torch.Tensor:
        """The group of every input."""
        if self.group_of_K is not None:
            return self.group_of_K.long()
        width, count = self.code_NK.shape[1], self.scale_NG.shape[1]
        return torch.arange(width) // (self.group or -(-width // count))

    def of_inputs(self, values_NG: torch.Tensor) -> torch.Tensor:
        """Values of groups as values of every input."""
        if self.by_rows > 1:
            values_NG = values_NG.repeat_interleave(self.by_rows, 0)[: len(self.code_NK)]
        return values_NG[:, self.groups()]

    def weight(self) -> torch.Tensor:
        """float32, [N, K]."""
        code_NK = self.code_NK.float()
        if self.zero_NG is not None:
            code_NK = code_NK - self.of_inputs(self.zero_NG.float())
        return code_NK * self.of_inputs(self.scale_NG.float())


Parts = Callable[[str], torch.Tensor | None]  # the rest of a tensor's name -> the tensor


def fields_of(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The unsigned fields of int32 words, lowest first, along `dim`."""
    shifts = torch.arange(0, 32, bits)
    fields = words.unsqueeze(-1) >> shifts & ((1 << bits) - 1)
    if dim == 0:
        return fields.movedim(-1, 1).reshape(-1, *words.shape[1:])
    return fields.reshape(*words.shape[:-1], -1)


def need(part: Parts, name: str) -> torch.Tensor:
    found = part(name)
    if found is None:
        raise ModelError(f"the quantised checkpoint lacks *{name}; download it again")
    return found


def gptq(part: Parts, config: Mapping[str, Any]) -> Matrix:
    bits = int(config.get("bits", 4))
    if bits not in (2, 4, 8):
        raise ModelError(f"GPTQ with {bits} bits is not read; use 2, 4 or 8 bits")
    zeros = need(part, ".qzeros")
    if config.get("checkpoint_format", "gptq") != "gptq_v2":
        # Stored less one, by a subtraction of whole words: a zero point of 0 borrows from the next.
        zeros = zeros + sum(1 << at for at in range(0, 32, bits))
    zero_NG = fields_of(zeros, bits, 1).t()
    code_NK = fields_of(need(part, ".qweight"), bits, 0).t()
    scale_NG, order = need(part, ".scales").t(), part(".g_idx")
    size = int(config.get("group_size", -1))
    made = Matrix(
        code_NK, scale_NG, zero_NG, group=size if size > 0 else code_NK.shape[1], bits=bits
    )
    if order is not None and not torch.equal(order.long(), made.groups()):
        made.group_of_K = order
    return made


def awq(part: Parts, config: Mapping[str, Any]) -> Matrix:
    version, bits = str(config.get("version", "gemm")).lower(), int(config.get("bits", 4))
    if version != "gemm" or bits != 4:
        raise ModelError(f"AWQ of version {version!r} with {bits} bits is not read; use gemm, 4")

    def columns(words: torch.Tensor) -> torch.Tensor:
        fields = fields_of(words, 4, 1).reshape(len(words), -1, 8)
        return fields[:, :, torch.tensor(_AWQ_ORDER).argsort()].flatten(1)

    zero_NG = columns(need(part, ".qzeros")).t()
    return Matrix(columns(need(part, ".qweight")).t(), need(part, ".scales").t(), zero_NG, bits=4)


def compressed(part: Parts, config: Mapping[str, Any]) -> Matrix:
    weights = _scheme(config)
    bits, symmetric = int(weights.get("num_bits", 8)), bool(weights.get("symmetric", True))
    scale_NG = need(part, ".weight_scale")
    scale_NG = scale_NG.reshape(1, 1) if scale_NG.numel() == 1 else scale_NG.flatten(1)
    packed, zero_NG = part(".weight_packed"), None
    if packed is None:
        code_NK = need(part, ".weight")
        if not symmetric:
            zero_NG = need(part, ".weight_zero_point").float()
    else:
        if bits not in (2, 4, 8):  # whose packing depends on the version of the library
            raise ModelError(f"compressed-tensors with {bits} bits are not read; use 2, 4 or 8")
        width = int(need(part, ".weight_shape")[1])
        code_NK = fields_of(packed, bits, 1)[:, :width]
        middle = torch.full_like(scale_NG, 1 << (bits - 1), dtype=torch.float32)
        zero_NG = middle
        if not symmetric:
            zero_NG = fields_of(need(part, ".weight_zero_point"), bits, 0)[: len(code_NK)]
    blocks = weights.get("block_structure")
    made = Matrix(code_NK, scale_NG, zero_NG, part(".weight_g_idx"), bits=bits)
    if weights.get("strategy") == "block" and blocks:
        made.by_rows, made.group = int(blocks[0]), int(blocks[1])
    elif weights.get("group_size"):
        made.group = int(weights["group_size"])
    return made


def _scheme(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The description of weights, which all groups of layers must share."""
    kind = config.get("format", "dense")
    groups = list((config.get("config_groups") or {}).values())
    schemes = [group.get("weights") for group in groups]
    known = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
    if kind not in known or not schemes or any(scheme != schemes[0] for scheme in schemes):
        raise ModelError(f"compressed-tensors of the format {kind!r} is not read; use another")
    scheme: Mapping[str, Any] = schemes[0]
    return scheme


def fp8(part: Parts, config: Mapping[str, Any]) -> Matrix:
    code_NK, inverse = need(part, ".weight"), part(".weight_scale_inv")
    if inverse is None:
        return Matrix(code_NK, need(part, ".weight_scale").reshape(-1, 1))
    if inverse.dtype == torch.uint8:  # exponents
        inverse = torch.exp2(inverse.float() - 127)
    if inverse.numel() == 1:
        return Matrix(code_NK, inverse.reshape(1, 1))
    rows, columns = config.get("weight_block_size") or (128, 128)
    return Matrix(code_NK, inverse, by_rows=int(rows), group=int(columns))


def bitsandbytes(part: Parts, config: Mapping[str, Any]) -> Matrix:
    whole = part(".SCB")
    if whole is not None:
        # In the library's order, which decides the last bit.
        return Matrix(need(part, ".weight") * whole.float()[:, None], torch.full((1, 1), 1 / 127))
    state = part(".weight.quant_state.bitsandbytes__nf4")
    if state is None:
        state = need(part, ".weight.quant_state.bitsandbytes__fp4")
    about = json.loads(bytes(state.tolist()))
    packed = need(part, ".weight").flatten().view(torch.uint8)  # two bytes may stand as bfloat16
    code = torch.stack([packed >> 4, packed & 15], 1).flatten()
    values = need(part, ".weight.quant_map").float()[code.long()]
    scale = need(part, ".weight.absmax")
    if scale.dtype == torch.uint8:
        nested = need(part, ".weight.nested_quant_map").float()[scale.long()]
        outer = need(part, ".weight.nested_absmax").float()
        nested = nested * outer.repeat_interleave(int(about["nested_blocksize"]))[: len(nested)]
        scale = nested + float(about.get("nested_offset", 0))
    weight = values * scale.repeat_interleave(int(about["blocksize"]))[: len(values)]
    return Matrix(weight.reshape(about["shape"]), torch.ones(1, 1))


FORMS: dict[str, Callable[[Parts, Mapping[str, Any]], Matrix]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "fp8": fp8,
    "bitsandbytes": bitsandbytes,
}
MXFP4 = "mxfp4"  # of experts alone: see `mxfp4`
METHODS = (*FORMS, MXFP4)
