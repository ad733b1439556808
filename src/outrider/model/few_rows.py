"""Linear modules that are fast for few rows in float32 on a CPU.

Torch's linear reads weights at a third to a half of the memory's speed there; the transposed
product reads them at nearly all of it. Both sum the same numbers, in another order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

MOST_ROWS = 16  # beyond them both are equally fast
_LEAST_ROWS = 4  # one row alone would be a product of matrix and vector, at half the speed
_TILE = 8  # more rows than these are fast in multiples of them


class FewRowsLinear(torch.nn.Linear):
    """`torch.nn.Linear`, whose weight and bias it has."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        num_rows = input.numel() // self.in_features
        if not 0 < num_rows <= MOST_ROWS:
            return super().forward(input)
        rows_RI = input.reshape(num_rows, self.in_features)
        missing = -num_rows % _TILE if num_rows > _TILE else _LEAST_ROWS - num_rows
        if missing > 0:
            rows_RI = F.pad(rows_RI, (0, 0, 0, missing))
        out_OR = torch.mm(self.weight, rows_RI.t())
        if self.bias is not None:
            out_OR += self.bias[:, None]
        out_RO = out_OR[:, :num_rows].t().contiguous()  # attention is slow over other strides
        return out_RO.view(*input.shape[:-1], self.out_features)


def use_few_rows(model: torch.nn.Module) -> None:
    """Exchanges the class of the plain linear modules whose weights this helps."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and _helps(module.weight):
            module.__class__ = FewRowsLinear


def _helps(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32
