"""The DFlash head, which drafts a block of tokens in one pass.

Shapes: B sequences, C context positions, S block size, H hidden, T taps, V vocabulary; N heads,
Q queries, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from torch import Tensor, nn

from outrider.model.head_base import Head, plain_fields
from outrider.model.head_layers import Attention, FeedForward, KeyValue, join, rotary

# Maps queries, [B, N, Q, D], and the keys and values of the same positions to attended values.
Mix = Callable[[Tensor, KeyValue], Tensor]


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    hidden_size: int
    vocab_size: int
    taps: tuple[int, ...]
    mask_token_id: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int = 8
    markov_rank: int = 0
    confidence: bool = False
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class DFlashLayer(nn.Module):
    """A Qwen3-shaped layer whose keys and values also come from the target's features."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(
            size,
            size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            normed=True,
            eps=eps,
        )
        self.mlp = FeedForward(size, config.intermediate_size)

    def forward(self, x_BSH: Tensor, cos_sin: KeyValue, mix: Mix) -> Tensor:
        normed_BSH = self.input_layernorm(x_BSH)
        own = self.self_attn.keys_values(normed_BSH, cos_sin)
        queries = self.self_attn.queries(normed_BSH, cos_sin)
        x_BSH = x_BSH + self.self_attn.output(mix(queries, own))
        output: Tensor = x_BSH + self.mlp(self.post_attention_layernorm(x_BSH))
        return output


class DFlashHead(Head):
    """Denoises a block in one bidirectional pass (DFlash), optionally with DSpark's two additions.

    A block is the last known token, then mask tokens; the output at place i >= 1 predicts the token
    *at* that place, through the target's output head. The Markov bias adds a low-rank table indexed
    by the token at place i - 1; the confidence is the predicted acceptance at place i.
    """

    kind = "dflash"

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config, self.taps = config, config.taps
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(size, eps=eps)
        if config.markov_rank:
            self.markov_embed = nn.Embedding(config.vocab_size, config.markov_rank)
            self.markov_head = nn.Linear(config.markov_rank, config.vocab_size, bias=False)
            nn.init.zeros_(self.markov_head.weight)
        if config.confidence:
            self.confidence_head = nn.Linear(size, 1)

    def fuse(self, taps_BCTH: Tensor) -> Tensor:
        """The target's features at `config.taps` as the context of every layer, [B, C, H]."""
        fused: Tensor = self.hidden_norm(self.fc(taps_BCTH.flatten(2)))
        return fused

    def context(self, features_BCH: Tensor, positions_BC: Tensor) -> list[KeyValue]:
        """Keys and values of `fuse`d features for each layer; append as tokens are committed."""
        cos_sin = rotary(positions_BC, self.config.head_dim, self.config.rope_theta)
        return [layer.self_attn.keys_values(features_BCH, cos_sin) for layer in self.layers]  # type: ignore[operator, union-attr]

    def forward(
        self,
        embeds_BSH: Tensor,
        positions_BS: Tensor,
        context: list[KeyValue],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Normalised hidden states of the block, [B, S, H], ready for the target's head."""

        def over(past: KeyValue) -> Mix:
            return lambda queries, own: Attention.mix(queries, join([past, own]), mask)

        return self.denoise(embeds_BSH, positions_BS, [over(past) for past in context])

    def denoise(self, embeds_BSH: Tensor, positions_BS: Tensor, mixes: Sequence[Mix]) -> Tensor:
        """`forward` for callers that attend to the context themselves, with one `Mix` per layer."""
        cos_sin = rotary(positions_BS, self.config.head_dim, self.config.rope_theta)
        for layer, mix in zip(self.layers, mixes, strict=True):
            embeds_BSH = layer(embeds_BSH, cos_sin, mix)
        output: Tensor = self.norm(embeds_BSH)
        return output

    def markov_bias(self, previous_BS: Tensor) -> Tensor:
        """The bias from the previous token, [B, S, V]; only with `markov_rank`."""
        bias: Tensor = self.markov_head(self.markov_embed(previous_BS))
        return bias

    def confidence(self, hidden_BSH: Tensor) -> Tensor:
        """Predicted acceptance of each place, [B, S]; only with `confidence`."""
        scores: Tensor = self.confidence_head(hidden_BSH)[..., 0].float().sigmoid()
        return scores

    def config_json(self) -> dict[str, Any]:
        fields = asdict(self.config)
        # Layer ids start at 0, so the output of layer i is our tap i + 1.
        dflash = {
            "mask_token_id": fields.pop("mask_token_id"),
            "target_layer_ids": [tap - 1 for tap in fields.pop("taps")],
            "markov_rank": fields.pop("markov_rank"),
            "confidence": fields.pop("confidence"),
        }
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "dflash_config": dflash,
            **fields,
        }

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Self:
        dflash = config["dflash_config"]
        return cls(
            DFlashConfig(
                mask_token_id=dflash["mask_token_id"],
                taps=tuple(layer + 1 for layer in dflash["target_layer_ids"]),
                markov_rank=dflash.get("markov_rank", 0),
                confidence=dflash.get("confidence", False),
                **plain_fields(DFlashConfig, config),
            )
        )
