"""The tensor types of GGUF that we read, and the sizes of their blocks."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ModelError


@dataclass(frozen=True, slots=True)
class TensorType:
    """`id` is the number in the file. A block holds `values` values in `size` bytes."""

    id: int
    name: str
    values: int
    size: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row, whose width is a multiple of `values`."""
        return columns // self.values * self.size


_READ = (
    TensorType(0, "F32", 1, 4),
    TensorType(1, "F16", 1, 2),
    TensorType(30, "BF16", 1, 2),
    TensorType(2, "Q4_0", 32, 18),
    TensorType(3, "Q4_1", 32, 20),
    TensorType(6, "Q5_0", 32, 22),
    TensorType(7, "Q5_1", 32, 24),
    TensorType(8, "Q8_0", 32, 34),
    TensorType(10, "Q2_K", 256, 84),
    TensorType(11, "Q3_K", 256, 110),
    TensorType(12, "Q4_K", 256, 144),
    TensorType(13, "Q5_K", 256, 176),
    TensorType(14, "Q6_K", 256, 210),
    TensorType(20, "IQ4_NL", 32, 18),
    TensorType(23, "IQ4_XS", 256, 136),
    TensorType(39, "MXFP4", 32, 17),
)
TYPES = {kind.id: kind for kind in _READ}
INTEGERS = {27: TensorType(27, "I64", 1, 8)}  # of tables in heads, never of weights
_REFUSED = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}


def tensor_type(id: int, tensor: str) -> TensorType:
    """The type with this number; `ModelError`, naming it, if we do not read it."""
    found = TYPES.get(id) or INTEGERS.get(id)
    if found is None:
        name = _REFUSED.get(id, f"type {id}")
        raise ModelError(
            f"{tensor} is stored as {name}, which we do not read; "
            "use a file quantised to Q4_K_M, Q6_K or Q8_0"
        )
    return found
