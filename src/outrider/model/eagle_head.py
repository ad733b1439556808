"""The EAGLE head: a small decoder that continues the target's features, in all published variants.

Row i reads the features of token i, or its own output for the row before, and the embedding of
token i + 1. It guesses token i + 2.

- EAGLE-3 fuses several taps of the target into features. Layer 0 attends over both inputs side by
  side.
- EAGLE-1 takes the target's last normalised state as features and projects both inputs to one.
- P-EAGLE appends rows of a mask token with a learned feature, so that one pass gives all drafts.

Shapes: B sequences, Q rows, H hidden, T taps, D head size, N heads, V vocabulary, W draft
vocabulary, F width of all taps side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.model.head_base import Head
from outrider.model.head_json import layers_json
from outrider.model.head_layers import Attention, FeedForward, KeyValue, join, rotary
from outrider.model.rope import PLAIN_ROPE, RopeConfig

# Maps queries, [B, N, Q, D], and the keys and values of all rows of a pass to attended values.
Mix = Callable[[Tensor, KeyValue], Tensor]


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """The defaults are those of EAGLE-3."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_hidden_layers: int = 1
    max_position_embeddings: int = 2048
    rope: RopeConfig = PLAIN_ROPE
    rms_norm_eps: float = 1e-6
    target_hidden_size: int | None = None  # None: the head is as wide
    windows: tuple[int | None, ...] = ()  # rows that a layer's rows see; (): all rows
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    fc_bias: bool = False
    logit_scale: float = 1.0
    # What comes in.
    reads_last_state: bool = False  # features are the target's last state, after its norm
    projects: bool = False  # EAGLE-1: `fc` makes one input of embedding and features
    first_norm: bool = True  # EAGLE-1 has none in front of layer 0
    num_fc_norms: int = 0  # one norm for each tap
    input_norm: bool = False  # one norm over all taps
    norm_before_residual: bool = False
    # What goes out.
    output_norm: bool = True
    norm_output: bool = False  # the normalised output is fed back
    own_embedding: bool = False
    own_head: bool = True
    mask_token_id: int | None = None  # P-EAGLE


class EagleLayer(nn.Module):
    """A Llama layer. The first one of an EAGLE-3 head attends over two inputs side by side."""

    def __init__(self, config: Eagle3Config, index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        is_wide = index == 0 and not config.projects
        self.hidden_norm = nn.RMSNorm(size, eps=eps) if is_wide else None
        normed = index > 0 or config.first_norm
        self.input_layernorm = nn.RMSNorm(size, eps=eps) if normed else None
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(
            2 * size if is_wide else size,
            size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            normed=config.qk_norm,
            biased=config.attention_bias,
            output_biased=config.output_bias,
            eps=eps,
        )
        self.mlp = FeedForward(size, config.intermediate_size)

    def normed(self, x_BQH: Tensor) -> Tensor:
        return x_BQH if self.input_layernorm is None else self.input_layernorm(x_BQH)

    def finish(self, residual_BQH: Tensor, mixed_BNQD: Tensor) -> Tensor:
        """The layer's output from the attended values."""
        x_BQH = residual_BQH + self.self_attn.output(mixed_BNQD)
        output: Tensor = x_BQH + self.mlp(self.post_attention_layernorm(x_BQH))
        return output


class Eagle3Head(Head):
    """See the module; `kind` is "eagle3", "eagle" or "p-eagle"."""

    kind = "eagle3"

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config, self.taps, self.vocab_size = config, config.taps, config.vocab_size
        self.kind = _kind(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.target_size = config.target_hidden_size or size
        wide = len(config.taps) * self.target_size
        width = 2 * size if config.projects else 0 if config.reads_last_state else wide
        self.fc = nn.Linear(width, size, bias=config.fc_bias) if width else None
        self.layers = nn.ModuleList(
            EagleLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(size, eps=eps) if config.output_norm else None
        self.lm_head: nn.Linear | None = None
        self.d2t: Tensor | None
        ids = None
        if config.own_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
            ids = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        self.register_buffer("d2t", ids)  # target id of draft id i is i + d2t[i]
        self.fc_norm = nn.ModuleList(
            nn.RMSNorm(self.target_size, eps=eps) for _ in range(config.num_fc_norms)
        )
        self.input_norm = nn.RMSNorm(wide, eps=eps) if config.input_norm else None
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(wide))

    @property
    def target_ids(self) -> Tensor:
        """The target id of every draft id."""
        if self.d2t is None:
            return torch.arange(self.config.vocab_size)
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_target_ids(self, ids: Tensor) -> None:
        """Sets the draft vocabulary: distinct target ids, ascending. Mutates d2t."""
        assert self.d2t is not None
        self.d2t.copy_(ids.to(self.d2t) - torch.arange(len(ids), device=self.d2t.device))

    def fuse(self, taps_BQTH: Tensor) -> Tensor:
        """The target's features at `config.taps`, [B, Q, T, H], as one hidden state [B, Q, H].

        Where the head reads the last state, the caller gives it normalised: it is what comes out.
        """
        if self.config.reads_last_state:
            return taps_BQTH[:, :, 0]
        assert self.fc is not None
        if self.fc_norm:
            parts = zip(self.fc_norm, taps_BQTH.unbind(2), strict=True)
            taps_BQTH = torch.stack([norm(part) for norm, part in parts], dim=2)
        wide_BQF = taps_BQTH.flatten(2)
        if self.input_norm is not None:
            wide_BQF = self.input_norm(wide_BQF)
        fused: Tensor = self.fc(wide_BQF)
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

        For heads of one layer. The queries see `past` and each other under `mask`
        ([B or 1, 1, Q, C + Q], True: visible).
        """
        kept: list[KeyValue] = []

        def mix(queries: Tensor, own: KeyValue) -> Tensor:
            kept.append(own)
            return Attention.mix(queries, own if past is None else join([past, own]), mask)

        x_BQH = self.states(embeds_BQH, hidden_BQH, positions_BQ, [mix])
        return self.fed_back(x_BQH), self.logits(x_BQH), kept[0]

    def states(
        self,
        embeds_BQH: Tensor,
        hidden_BQH: Tensor,
        positions_BQ: Tensor,
        mixes: Sequence[Mix],
        wanted: list[int] | None = None,
    ) -> Tensor:
        """The states after the last layer of the `wanted` rows (None: of all), [B, Q, H].

        For callers that attend by themselves, with one `Mix` per layer. Keys and values do not
        depend on the layer's own attention, so the last layer's queries are of `wanted` rows only.
        """
        cos_sin = rotary(positions_BQ, self.config.head_dim, self.config.rope)
        x_BQH, inputs = self._enter(embeds_BQH, hidden_BQH)
        for number, (layer, mix) in enumerate(zip(self.layers, mixes, strict=True)):
            assert isinstance(layer, EagleLayer)
            if number:
                inputs = layer.normed(x_BQH)
            own = layer.self_attn.keys_values(inputs, cos_sin)
            if wanted is not None and number == len(self.layers) - 1:
                x_BQH, inputs = x_BQH[:, wanted], inputs[:, wanted]
                cos_sin = (cos_sin[0][:, :, wanted], cos_sin[1][:, :, wanted])
            x_BQH = layer.finish(x_BQH, mix(layer.self_attn.queries(inputs, cos_sin), own))
        return x_BQH

    def _enter(self, embeds_BQH: Tensor, hidden_BQH: Tensor) -> tuple[Tensor, Tensor]:
        """What layer 0 adds its output to, and the input of its projections."""
        first = self.layers[0]
        assert isinstance(first, EagleLayer)
        if self.config.projects:
            assert self.fc is not None
            x_BQH = self.fc(torch.cat([embeds_BQH, hidden_BQH], dim=-1))
            return x_BQH, first.normed(x_BQH)
        assert first.hidden_norm is not None
        normed_BQH = first.hidden_norm(hidden_BQH)
        inputs = torch.cat([first.normed(embeds_BQH), normed_BQH], dim=-1)
        return normed_BQH if self.config.norm_before_residual else hidden_BQH, inputs

    def fed_back(self, state_BQH: Tensor) -> Tensor:
        """What the next row reads instead of features."""
        return self.normed(state_BQH) if self.config.norm_output else state_BQH

    def normed(self, state_BQH: Tensor) -> Tensor:
        """What the output head reads."""
        return state_BQH if self.norm is None else self.norm(state_BQH)

    def logits(self, state_BQH: Tensor) -> Tensor:
        """The logits over the draft vocabulary; only with a head of its own."""
        assert self.lm_head is not None
        logits: Tensor = self.lm_head(self.normed(state_BQH))
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def config_json(self) -> dict[str, Any]:
        """The layout of vLLM and SpecForge; of EAGLE-1, SGLang's."""
        config = self.config
        architecture = {
            "eagle3": "LlamaForCausalLMEagle3",
            "eagle": "LlamaForCausalLMEagle",
            "p-eagle": "PEagleDraftModel",
        }[self.kind]
        written: dict[str, Any] = {
            "architectures": [architecture],
            "model_type": "llama",
            "num_hidden_layers": config.num_hidden_layers,
            "tie_word_embeddings": False,
            **layers_json(config),
            "vocab_size": config.vocab_size,
        }
        if self.kind == "eagle":
            return written | {"bias": config.fc_bias}
        if config.reads_last_state:
            written["eagle_config"] = {"use_aux_hidden_state": False}
        else:
            written["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
        switches = {
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.norm_output,
            "fc_norm": config.num_fc_norms > 0,
            "norm_before_fc": config.input_norm,
            "mask_token_id": config.mask_token_id,
            "target_hidden_size": config.target_hidden_size,
        }
        written["draft_vocab_size"] = config.draft_vocab_size
        return written | {name: value for name, value in switches.items() if value}

    def published(self) -> dict[str, Tensor]:
        tensors = self.state_dict()
        if self.kind == "eagle3":
            tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
        if self.kind == "p-eagle":
            tensors["mask_hidden"] = tensors["mask_hidden"][None, None]
        return tensors

    @property
    def is_plain(self) -> bool:
        """Whether it is EAGLE-3 as in the paper: one layer, no bias, norms or windows besides."""
        usual = Eagle3Config(
            **{
                name: getattr(self.config, name)
                for name in (
                    *("hidden_size", "vocab_size", "draft_vocab_size", "taps", "head_dim"),
                    *("num_attention_heads", "num_key_value_heads", "intermediate_size"),
                    *("max_position_embeddings", "rope", "rms_norm_eps", "own_embedding"),
                )
            }
        )
        return self.config == usual


def _kind(config: Eagle3Config) -> str:
    if config.mask_token_id is not None:
        return "p-eagle"
    return "eagle" if config.projects else "eagle3"


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """The taps of an EAGLE-3 head whose config.json names none."""
    return (2, num_layers // 2, num_layers - 3)
