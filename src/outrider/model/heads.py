"""Drafting heads that read a target's hidden states: Medusa, EAGLE-3, DFlash.

Torch modules for training and inference. They hold no KV of their own (callers pass keys and values
in and get new ones back) and use the target's embedding and output head where the papers do.
Parameter names and config fields are those that vLLM reads, so vLLM can load a saved folder too.

A *tap* k is the target's hidden state after k layers (0: the embeddings).
Shapes: B sequences, Q positions, C context positions, H hidden, V vocabulary, T taps, n rows of
features, F width of all taps side by side.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from outrider.contracts import IntArray, ModelSpec, OwnsKV, StepBatch
from outrider.errors import ModelError
from outrider.model.borrowed import Borrowed
from outrider.model.dflash_head import DFlashConfig, DFlashHead
from outrider.model.head_base import ARCHITECTURES, Head, plain_fields
from outrider.model.head_layers import Attention, FeedForward, KeyValue, join, rotary
from outrider.sampling import RowParams

__all__ = [
    "HEADS",
    "DFlashConfig",
    "DFlashHead",
    "Eagle3Config",
    "Eagle3Head",
    "FastHead",
    "Head",
    "MedusaConfig",
    "MedusaHeads",
    "RunsHeads",
    "load_head",
]


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_hidden_layers: int = 1
    # True: all heads share the target's output head, which is not stored here.
    original_lm_head: bool = True


class MedusaHeads(Head):
    """Head h predicts the token h + 2 places after the token whose state it reads (Medusa-1)."""

    kind = "medusa"
    copies = frozenset({"lm_heads.0.weight"})  # if `original_lm_head`

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "layers": nn.ModuleList(
                        nn.Linear(size, size, bias=False) for _ in range(config.num_hidden_layers)
                    )
                }
            )
            for _ in range(config.num_heads)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)  # starts with the target's own prediction
        if not config.original_lm_head:
            self.lm_heads = nn.ModuleList(
                nn.Linear(size, config.vocab_size, bias=False) for _ in range(config.num_heads)
            )

    def forward(self, hidden_BQH: Tensor, num_heads: int | None = None) -> Tensor:
        """The states of all heads, [num_heads, B, Q, H], from the target's normalised state."""
        outputs = []
        for block in self.blocks[:num_heads]:
            x_BQH = hidden_BQH
            for layer in block["layers"]:  # type: ignore[index]
                x_BQH = x_BQH + F.silu(layer(x_BQH))
            outputs.append(x_BQH)
        return torch.stack(outputs)

    def config_json(self) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_fc_bias": False,
            "truncated_vocab_size": self.config.vocab_size,
            **asdict(self.config),
        }

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Self:
        return cls(MedusaConfig(**plain_fields(MedusaConfig, config)))


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class Eagle3Head(Head):
    """One decoder layer that continues the target's features (EAGLE-3).

    Position i reads the features of token i (`fuse` of the taps; in a draft the head's own output)
    and the embedding of token i + 1. It predicts token i + 2 among the `draft_vocab_size` most
    frequent ids.
    """

    kind = "eagle3"

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config, self.taps = config, config.taps
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "hidden_norm": nn.RMSNorm(size, eps=eps),
                "input_layernorm": nn.RMSNorm(size, eps=eps),
                "post_attention_layernorm": nn.RMSNorm(size, eps=eps),
                "self_attn": Attention(
                    2 * size,
                    size,
                    config.num_attention_heads,
                    config.num_key_value_heads,
                    config.head_dim,
                ),
                "mlp": FeedForward(size, config.intermediate_size),
            }
        )
        self.norm = nn.RMSNorm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        # Target id of draft id i is i + d2t[i].
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    @property
    def target_ids(self) -> Tensor:
        """The target id of every draft id, ascending."""
        assert isinstance(self.d2t, Tensor)
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_target_ids(self, ids: Tensor) -> None:
        """Sets the draft vocabulary: distinct target ids, ascending. Mutates d2t."""
        assert isinstance(self.d2t, Tensor)
        self.d2t.copy_(ids.to(self.d2t) - torch.arange(len(ids), device=self.d2t.device))

    def fuse(self, taps_BQTH: Tensor) -> Tensor:
        """The target's features at `config.taps`, [B, Q, T, H], as one hidden state [B, Q, H]."""
        fused: Tensor = self.fc(taps_BQTH.flatten(2))
        return fused

    def forward(
        self,
        embeds_BQH: Tensor,
        hidden_BQH: Tensor,
        positions_BQ: Tensor,
        past: KeyValue | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, KeyValue]:
        """(state to feed back, logits over the draft vocabulary, keys and values of the Q rows).

        The queries see `past` and each other under `mask` ([B or 1, 1, Q, C + Q], True: visible).
        """
        inputs = self.inputs(embeds_BQH, hidden_BQH)
        cos_sin = self.rotary(positions_BQ)
        own = self.attention.keys_values(inputs, cos_sin)
        everything = own if past is None else join([past, own])
        mixed = self.attention.mix(self.attention.queries(inputs, cos_sin), everything, mask)
        x_BQH = self.state(hidden_BQH, mixed)
        return x_BQH, self.logits(x_BQH), own

    # The same in pieces, for callers with a KV store. Keys and values depend on the inputs only, so
    # that of a long text only the last position needs the other steps.

    @property
    def attention(self) -> Attention:
        layer: Any = self.midlayer
        attention: Attention = layer["self_attn"]
        return attention

    def rotary(self, positions_BQ: Tensor) -> KeyValue:
        return rotary(positions_BQ, self.config.head_dim, self.config.rope_theta)

    def inputs(self, embeds_BQH: Tensor, hidden_BQH: Tensor) -> Tensor:
        """The input of the projections to queries, keys and values, [B, Q, 2 H]."""
        layer: Any = self.midlayer
        return torch.cat(
            [layer["input_layernorm"](embeds_BQH), layer["hidden_norm"](hidden_BQH)], dim=-1
        )

    def state(self, hidden_BQH: Tensor, mixed_BNQD: Tensor) -> Tensor:
        """The state to feed back, [B, Q, H], from the attended values."""
        layer: Any = self.midlayer
        x_BQH = hidden_BQH + self.attention.output(mixed_BNQD)
        state: Tensor = x_BQH + layer["mlp"](layer["post_attention_layernorm"](x_BQH))
        return state

    def logits(self, state_BQH: Tensor) -> Tensor:
        """The logits over the draft vocabulary."""
        logits: Tensor = self.lm_head(self.norm(state_BQH))
        return logits

    def config_json(self) -> dict[str, Any]:
        fields = asdict(self.config)
        taps = list(fields.pop("taps"))
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": taps,
            **fields,
        }

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Self:
        taps = tuple(config["eagle_aux_hidden_state_layer_ids"])
        return cls(Eagle3Config(taps=taps, **plain_fields(Eagle3Config, config)))


class FastHead(OwnsKV, Protocol):
    """A head with a paged KV of its own that drafts in one call, without its torch module."""

    spec: ModelSpec
    trees: bool  # whether it implements `capabilities.DraftsInOneCall`, trees included

    def use(self, features_nF: Tensor) -> None:
        """The next call reads these features, one row for each token of its batch."""
        ...

    def draft_chain(
        self,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
    ) -> list[list[int]]:
        """`num_tokens_S[s]` tokens for sequence s; see `capabilities.DraftsInOneCall`."""
        ...


@runtime_checkable
class RunsHeads(Protocol):
    """A target that can run heads with a paged KV, without their torch modules."""

    def head_weights(self, kind: str) -> tuple[str, ...]:
        """The possible dtypes of heads of this kind, the default first; empty: no such heads."""
        ...

    def make_head(self, head: Head, borrowed: Borrowed, weights: str) -> FastHead:
        """Builds the fast head; `weights` must be one of `head_weights`."""
        ...


HEADS: dict[str, type[Head]] = {cls.kind: cls for cls in (MedusaHeads, Eagle3Head, DFlashHead)}


def load_head(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Head:
    """Loads a folder that `Head.save` wrote; the head is in eval mode on the CPU."""
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        cls = HEADS[ARCHITECTURES[config["architectures"][0]]]
        head = cls.from_json(config)
        tensors = load_file(folder / "model.safetensors")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(
            f"{folder} holds no drafting head ({type(error).__name__}: {error})"
        ) from None
    missing, unexpected = head.load_state_dict(tensors, strict=False)
    wrong = [*missing, *(name for name in unexpected if name not in head.copies)]
    if wrong:
        names = ", ".join(wrong[:3])
        raise ModelError(f"{folder} does not match its config.json: {names}")
    return head.to(dtype).eval()
