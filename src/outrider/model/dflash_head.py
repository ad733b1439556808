"""The DFlash head, which drafts a block of tokens in one pass, with DSpark's additions.

Shapes: B sequences, C context positions, S block size, H hidden, T taps, V vocabulary, W draft
vocabulary; N heads, Q queries, D head size, R rows, M rank of the Markov bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.model.head_base import Head
from outrider.model.head_json import layers_json
from outrider.model.head_layers import Attention, FeedForward, KeyValue, join, rotary
from outrider.model.rope import PLAIN_ROPE, RopeConfig

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
    markov_type: str = "vanilla"  # or "gated", "rnn"
    confidence: bool = False
    confidence_with_markov: bool = False
    max_position_embeddings: int = 2048
    rope: RopeConfig = PLAIN_ROPE
    rms_norm_eps: float = 1e-6
    target_hidden_size: int | None = None  # None: the head is as wide
    windows: tuple[int | None, ...] = ()  # of each layer; (): none slides
    causal: tuple[bool, ...] = ()  # whether a layer's places see only places before; (): no
    attention_bias: bool = False
    output_bias: bool = False
    sinks: bool = False  # a score of each head that has no value, in every layer
    # Place j guesses the token after it: S drafts from S places. False: the token at it, S - 1.
    samples_from_anchor: bool = False
    draft_vocab_size: int | None = None  # rows of an output head of its own; None: the target's
    own_embedding: bool = False
    mask_embedding: bool = False  # instead of the mask token's embedding

    @property
    def num_drafts(self) -> int:
        return self.block_size - self.first_place

    @property
    def first_place(self) -> int:
        """The place of the block that guesses the first draft."""
        return 0 if self.samples_from_anchor else 1


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
            biased=config.attention_bias,
            output_biased=config.output_bias,
            eps=eps,
        )
        if config.sinks:
            heads = torch.zeros(config.num_attention_heads)
            self.self_attn.attention_sink_bias = nn.Parameter(heads)
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
    *at* that place, or with `samples_from_anchor` that after it. The Markov bias adds a low-rank
    table indexed by the token before the predicted one; the confidence is the predicted acceptance.
    """

    kind = "dflash"

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config, self.taps, self.vocab_size = config, config.taps, config.vocab_size
        self.num_draft_tokens = config.num_drafts
        size, eps, rank = config.hidden_size, config.rms_norm_eps, config.markov_rank
        self.target_size = config.target_hidden_size or size
        rows = config.draft_vocab_size or config.vocab_size
        self.fc = nn.Linear(len(config.taps) * self.target_size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(size, eps=eps)
        if rank:
            self.markov_embed = nn.Embedding(config.vocab_size, rank)
            self.markov_head = nn.Linear(rank, rows, bias=False)
            nn.init.zeros_(self.markov_head.weight)
            if config.markov_type == "gated":
                self.gate_proj = nn.Linear(size + rank, rank)
            elif config.markov_type == "rnn":
                self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)
        if config.confidence:
            width = size + (rank if config.confidence_with_markov else 0)
            self.confidence_head = nn.Linear(width, 1)
        self.lm_head: nn.Linear | None = None
        self.d2t: Tensor | None
        ids = None
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(size, rows, bias=False)
            ids = torch.zeros(rows, dtype=torch.int64)
        self.register_buffer("d2t", ids)  # target id of draft id i is i + d2t[i]
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if config.mask_embedding:
            self.mask_embedding = nn.Parameter(torch.zeros(size))

    @property
    def target_ids(self) -> Tensor:
        """The target id of every draft id."""
        if self.d2t is None:
            return torch.arange(self.config.vocab_size)
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def fuse(self, taps_BCTH: Tensor) -> Tensor:
        """The target's features at `config.taps` as the context of every layer, [B, C, H]."""
        fused: Tensor = self.hidden_norm(self.fc(taps_BCTH.flatten(2)))
        return fused

    def context(self, features_BCH: Tensor, positions_BC: Tensor) -> list[KeyValue]:
        """Keys and values of `fuse`d features for each layer; append as tokens are committed."""
        cos_sin = rotary(positions_BC, self.config.head_dim, self.config.rope)
        return [layer.self_attn.keys_values(features_BCH, cos_sin) for layer in self.layers]  # type: ignore[operator, union-attr]

    def forward(
        self,
        embeds_BSH: Tensor,
        positions_BS: Tensor,
        context: list[KeyValue],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Normalised hidden states of the block, [B, S, H], ready for the output head."""

        def over(layer: int, past: KeyValue) -> Mix:
            return lambda queries, own: Attention.mix(
                queries, *self.with_sinks(layer, join([past, own]), mask, queries.shape[2])
            )

        mixes = [over(layer, past) for layer, past in enumerate(context)]
        return self.denoise(embeds_BSH, positions_BS, mixes)

    def with_sinks(
        self, layer: int, past: KeyValue, mask: Tensor | None, num_queries: int
    ) -> tuple[KeyValue, Tensor | None]:
        """Keys, values and mask with the layer's sinks, if it has any, as one more key.

        The key and its value are zero, and the mask adds the sink of each head to its score.
        """
        if not self.config.sinks:
            return past, mask
        attention: Any = self.layers[layer].self_attn
        sinks_N11 = attention.attention_sink_bias[:, None, None]
        width = past[0].shape[2]
        if mask is None:
            mask = sinks_N11.new_zeros(num_queries, width)
        elif mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=sinks_N11.dtype).masked_fill_(~mask, -math.inf)
        shape = (*mask.shape[:-3], len(sinks_N11), num_queries)  # of [Q, C] or [B, 1, Q, C]
        mask = torch.cat([mask.expand(*shape, width), sinks_N11.expand(*shape, 1)], dim=-1)
        return (F.pad(past[0], (0, 0, 0, 1)), F.pad(past[1], (0, 0, 0, 1))), mask

    def denoise(self, embeds_BSH: Tensor, positions_BS: Tensor, mixes: Sequence[Mix]) -> Tensor:
        """`forward` for callers that attend to the context themselves, with one `Mix` per layer."""
        cos_sin = rotary(positions_BS, self.config.head_dim, self.config.rope)
        for layer, mix in zip(self.layers, mixes, strict=True):
            embeds_BSH = layer(embeds_BSH, cos_sin, mix)
        output: Tensor = self.norm(embeds_BSH)
        return output

    def markov_bias(self, previous_BS: Tensor) -> Tensor:
        """The bias from the previous token, [B, S, W]; only with a vanilla Markov head."""
        bias: Tensor = self.markov_head(self.markov_embed(previous_BS))
        return bias

    def markov_step(
        self, hidden_RH: Tensor, previous_R: Tensor, state_RM: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(bias from the tokens before the place, [R, W], state for the next place).

        `state_RM` starts as zeros; only a Markov head of type "rnn" uses it.
        """
        embed_RM: Tensor = self.markov_embed(previous_R)
        if self.config.markov_type == "gated":
            gate_RM = self.gate_proj(torch.cat([hidden_RH, embed_RM], dim=-1)).sigmoid()
            embed_RM = gate_RM * embed_RM
        elif self.config.markov_type == "rnn":
            joint = self.joint_proj(torch.cat([state_RM, embed_RM, hidden_RH], dim=-1))
            gate_RM, candidate_RM, output_RM = joint.chunk(3, dim=-1)
            gate_RM = gate_RM.sigmoid()
            state_RM = gate_RM * state_RM + (1 - gate_RM) * candidate_RM.tanh()
            embed_RM = output_RM.tanh()
        return self.markov_head(embed_RM), state_RM

    def confidence(self, hidden_BSH: Tensor, previous_BS: Tensor | None = None) -> Tensor:
        """Predicted acceptance of each place, [B, S]; only with `confidence`.

        `previous_BS`: the tokens before, which some heads look at.
        """
        if self.config.confidence_with_markov:
            assert previous_BS is not None
            hidden_BSH = torch.cat([hidden_BSH, self.markov_embed(previous_BS)], dim=-1)
        scores: Tensor = self.confidence_head(hidden_BSH)[..., 0].float().sigmoid()
        return scores

    @property
    def is_plain(self) -> bool:
        """Whether it is DFlash as in the paper, or with our bundled head's Markov bias."""
        config = self.config
        varies = (config.target_hidden_size, config.windows, config.causal, config.attention_bias)
        own = (config.output_bias, config.draft_vocab_size, config.own_embedding)
        more = (config.mask_embedding, config.samples_from_anchor, config.sinks)
        return not any((*varies, *own, *more)) and config.markov_type == "vanilla"

    def config_json(self) -> dict[str, Any]:
        """z-lab's layout; with DSpark's additions or an output head, that of `speculators`."""
        if self.is_plain_dflash:
            return self._zlab_json()
        return self.speculators_json()

    @property
    def is_plain_dflash(self) -> bool:
        """Whether z-lab's layout has a form for it."""
        config = self.config
        extra = (config.markov_rank, config.confidence, config.draft_vocab_size)
        return not any((*extra, config.own_embedding, config.samples_from_anchor))

    def _zlab_json(self) -> dict[str, Any]:
        config = self.config
        # Layer ids start at 0, so the output of layer i is our tap i + 1.
        dflash: dict[str, Any] = {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [tap - 1 for tap in config.taps],
        }
        if config.sinks:
            dflash["attention_sink_bias"] = True
        if config.causal:
            dflash["causal"] = all(config.causal)
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **layers_json(config),
            "vocab_size": config.vocab_size,
            "num_hidden_layers": config.num_hidden_layers,
            "block_size": config.block_size,
            "dflash_config": dflash,
            "target_hidden_size": config.target_hidden_size,
            "tie_word_embeddings": False,
        }

    def speculators_json(self) -> dict[str, Any]:
        """The config.json of the `speculators` format."""
        config = self.config
        is_dspark = bool(config.markov_rank or config.confidence)
        name = "dspark" if is_dspark else "dflash"
        written: dict[str, Any] = {
            "architectures": ["DSparkSpeculator" if is_dspark else "DFlashSpeculator"],
            "speculators_model_type": name,
            "speculators_version": "0.5.0",
            "speculators_config": {
                "algorithm": name,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": config.num_drafts}
                ],
                "verifier": {"name_or_path": None, "architectures": []},
            },
            "transformer_layer_config": {
                "model_type": "qwen3",
                **layers_json(config),
                "num_hidden_layers": config.num_hidden_layers,
                "vocab_size": config.vocab_size,
            },
            "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
            "target_hidden_size": config.target_hidden_size,
            "tie_word_embeddings": False,
            "mask_token_id": config.mask_token_id,
            "aux_hidden_state_layer_ids": list(config.taps),
            "block_size": config.block_size,
            "sliding_window_non_causal": not any(config.causal),
            "sample_from_anchor": config.samples_from_anchor,
        }
        if is_dspark:
            written |= {
                "markov_rank": config.markov_rank,
                "markov_head_type": config.markov_type,
                "enable_confidence_head": config.confidence,
                "confidence_head_with_markov": config.confidence_with_markov,
            }
        return written

    def published(self) -> dict[str, Tensor]:
        return {_published(name): value for name, value in self.state_dict().items()}


RENAMED = {  # published -> ours
    "markov_head.markov_w1.": "markov_embed.",
    "markov_head.markov_w2.": "markov_head.",
    "markov_head.gate_proj.": "gate_proj.",
    "markov_head.joint_proj.": "joint_proj.",
    "confidence_head.proj.": "confidence_head.",
}


def _published(name: str) -> str:
    for published, ours in RENAMED.items():
        if name.startswith(ours):
            return published + name.removeprefix(ours)
    return name
