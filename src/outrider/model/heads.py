"""Drafting heads that ride on a target's hidden states: Medusa, EAGLE-3, DFlash.

Pure torch modules, used by training and by inference alike; they hold no KV of their own (callers
pass keys and values in and get new ones back) and borrow embedding and output head from the target
where the papers do. Parameter names and config fields are those vLLM loads, so a saved folder
serves there too.

A *tap* k is the target's hidden state after k layers (0: the embeddings).
Shapes: B sequences, Q positions, C context positions, H hidden, V vocabulary, T taps, S block size.
"""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.errors import ModelError
from outrider.model.head_layers import Attention, FeedForward, KeyValue, join, rotary
from outrider.model.weights import read_config

# From queries, [B, N, Q, D], and the same positions' keys and values to what attention gathers.
Mix = Callable[[Tensor, KeyValue], Tensor]


class Head(nn.Module, ABC):
    """Common to all: a frozen config dataclass, and folders of config.json + model.safetensors."""

    kind: str
    taps: tuple[int, ...] = ()

    @abstractmethod
    def config_json(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def from_json(cls, config: dict[str, Any]) -> Self: ...

    def save(self, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the folder, atomically. Floating-point tensors are stored as `dtype`."""
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tensors = {
            name: (value.to(dtype) if value.is_floating_point() else value).cpu().contiguous()
            for name, value in self.state_dict().items()
        }
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "model.safetensors").chmod(0o644)
        (partial / "config.json").write_text(json.dumps(self.config_json(), indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_hidden_layers: int = 1
    # True: all heads share the target's own output head, which is then not stored here.
    original_lm_head: bool = True


class MedusaHeads(Head):
    """Head h guesses the token h + 2 places after the one whose state it reads (Medusa-1)."""

    kind = "medusa"

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
            nn.init.zeros_(parameter)  # start as the target's own guess
        if not config.original_lm_head:
            self.lm_heads = nn.ModuleList(
                nn.Linear(size, config.vocab_size, bias=False) for _ in range(config.num_heads)
            )

    def forward(self, hidden_BQH: Tensor, num_heads: int | None = None) -> Tensor:
        """From the target's normalised last hidden state to each head's, [num_heads, B, Q, H]."""
        outputs = []
        for block in self.blocks[:num_heads]:
            x_BQH = hidden_BQH
            for layer in block["layers"]:  # type: ignore[index]
                x_BQH = x_BQH + F.silu(layer(x_BQH))
            outputs.append(x_BQH)
        return torch.stack(outputs)

    def output_head(self, index: int, target_head: nn.Module) -> nn.Module:
        """What turns head `index`'s hidden state into logits."""
        return target_head if self.config.original_lm_head else self.lm_heads[index]

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
        return cls(MedusaConfig(**_fields(MedusaConfig, config)))


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
    """One decoder layer that continues the target's features by itself (EAGLE-3).

    Position i reads the features of token i (`fuse` of the taps, later its own output) and the
    embedding of token i + 1, and guesses token i + 2 among the `draft_vocab_size` most frequent
    ids.
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
        """Target id of every draft id, ascending."""
        assert isinstance(self.d2t, Tensor)
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_target_ids(self, ids: Tensor) -> None:
        """Choose the draft vocabulary: distinct target ids, ascending. Mutates d2t."""
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
        """(state to feed back, logits over the draft vocabulary, keys and values of these Q).

        The queries see `past` and then themselves under `mask` ([B or 1, 1, Q, C + Q], True: may
        look).
        """
        inputs = self.inputs(embeds_BQH, hidden_BQH)
        cos_sin = self.rotary(positions_BQ)
        own = self.attention.keys_values(inputs, cos_sin)
        everything = own if past is None else join([past, own])
        mixed = self.attention.mix(self.attention.queries(inputs, cos_sin), everything, mask)
        x_BQH = self.state(hidden_BQH, mixed)
        return x_BQH, self.logits(x_BQH), own

    # The same in pieces, for callers with a store of their own. Keys and values depend on the
    # inputs alone: of a long text, only the last position needs the rest.

    @property
    def attention(self) -> Attention:
        layer: Any = self.midlayer
        attention: Attention = layer["self_attn"]
        return attention

    def rotary(self, positions_BQ: Tensor) -> KeyValue:
        return rotary(positions_BQ, self.config.head_dim, self.config.rope_theta)

    def inputs(self, embeds_BQH: Tensor, hidden_BQH: Tensor) -> Tensor:
        """What queries, keys and values are made of, [B, Q, 2 H]."""
        layer: Any = self.midlayer
        return torch.cat(
            [layer["input_layernorm"](embeds_BQH), layer["hidden_norm"](hidden_BQH)], dim=-1
        )

    def state(self, hidden_BQH: Tensor, mixed_BNQD: Tensor) -> Tensor:
        """From what attention gathered to the state to feed back, [B, Q, H]."""
        layer: Any = self.midlayer
        x_BQH = hidden_BQH + self.attention.output(mixed_BNQD)
        state: Tensor = x_BQH + layer["mlp"](layer["post_attention_layernorm"](x_BQH))
        return state

    def logits(self, state_BQH: Tensor) -> Tensor:
        """Over the draft vocabulary."""
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
        return cls(Eagle3Config(taps=taps, **_fields(Eagle3Config, config)))


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

    A block is the last known token followed by mask tokens; the output at place i >= 1 guesses the
    token *at* that place, through the target's own head. The Markov bias adds a low-rank table
    indexed by the token at place i - 1; the confidence is the predicted acceptance at place i.
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
        """`forward` for callers who look the context up themselves, in one way for each layer."""
        cos_sin = rotary(positions_BS, self.config.head_dim, self.config.rope_theta)
        for layer, mix in zip(self.layers, mixes, strict=True):
            embeds_BSH = layer(embeds_BSH, cos_sin, mix)
        output: Tensor = self.norm(embeds_BSH)
        return output

    def markov_bias(self, previous_BS: Tensor) -> Tensor:
        """What the token before adds to the logits, [B, S, V]; only with `markov_rank`."""
        bias: Tensor = self.markov_head(self.markov_embed(previous_BS))
        return bias

    def confidence(self, hidden_BSH: Tensor) -> Tensor:
        """Predicted acceptance of each place, [B, S]; only with `confidence`."""
        scores: Tensor = self.confidence_head(hidden_BSH)[..., 0].float().sigmoid()
        return scores

    def config_json(self) -> dict[str, Any]:
        fields = asdict(self.config)
        # Layer ids count layers from 0, so the output of layer i is our tap i + 1.
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
                **_fields(DFlashConfig, config),
            )
        )


ARCHITECTURES: dict[str, type[Head]] = {
    "MedusaModel": MedusaHeads,
    "LlamaForCausalLMEagle3": Eagle3Head,
    "DFlashDraftModel": DFlashHead,
}


def head_kind(folder: Path) -> str | None:
    """Which heads a folder holds, judged by its config.json; None: a model, or nothing of ours."""
    architectures = read_config(folder).get("architectures") or [""]
    found = ARCHITECTURES.get(architectures[0])
    return found.kind if found is not None else None


def load_head(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Head:
    """The head in a folder of the layout `Head.save` writes, in eval mode on the CPU."""
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
        cls = ARCHITECTURES[config["architectures"][0]]
        head = cls.from_json(config)
        tensors = load_file(folder / "model.safetensors")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(
            f"{folder} holds no drafting head ({type(error).__name__}: {error})"
        ) from None
    missing, unexpected = head.load_state_dict(tensors, strict=False)
    if missing or unexpected:
        names = ", ".join([*missing, *unexpected][:3])
        raise ModelError(f"{folder} does not match its config.json: {names}")
    return head.to(dtype).eval()


def _fields(cls: type, config: dict[str, Any]) -> dict[str, Any]:
    """The plain fields of a config dataclass found in a config.json."""
    return {
        name: config[name]
        for name in cls.__dataclass_fields__  # type: ignore[attr-defined]
        if name in config and name not in ("taps", "mask_token_id", "markov_rank", "confidence")
    }
