"""The MLP speculator (IBM, Snowflake Arctic): a recurrent net on the target's last state.

Step i mixes the state with the embedding of the token before and guesses the next one:

    s = gelu(norm_i(proj_i s + alpha emb_i[token])),   token = argmax head_i(s)

with w = 0.5 ** (0.5 / steps) and alpha = sqrt((1 - w^2) inner / 2) / w.

Shapes: R rows, H hidden of the target, I inner, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.model.head_base import Head

_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    emb_dim: int  # the target's width
    inner_dim: int
    vocab_size: int
    n_predict: int
    tie_weights: bool = False
    scale_input: bool = False


class MlpHead(Head):
    """Weights that steps share are stored once: step i uses the last one of each list."""

    kind = "mlp"

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.target_size = config.emb_dim
        self.num_draft_tokens = config.n_predict
        steps = 1 if config.tie_weights else config.n_predict
        inner, vocab_size = config.inner_dim, config.vocab_size
        num_proj = min(2, config.n_predict) if config.tie_weights else config.n_predict
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner) for _ in range(steps))
        self.proj = nn.ModuleList(
            nn.Linear(inner if step else config.emb_dim, inner, bias=False)
            for step in range(num_proj)
        )
        self.ln = nn.ParameterDict()
        for step in range(steps):
            self.ln[f"{step}_weight"] = torch.ones(inner)
            self.ln[f"{step}_bias"] = torch.zeros(inner)
        self.head = nn.ModuleList(nn.Linear(inner, vocab_size, bias=False) for _ in range(steps))
        weight = 0.5 ** (0.5 / config.n_predict)
        self._alpha = math.sqrt((1 - weight**2) * inner / 2) / weight

    def start(self, state_RH: Tensor) -> Tensor:
        """What step 0 reads, from the target's normalised states."""
        if not self.config.scale_input:
            return state_RH
        return F.rms_norm(state_RH, state_RH.shape[-1:], eps=_EPS) / math.sqrt(2)

    def mix(self, state_RI: Tensor, tokens_R: Tensor, step: int) -> Tensor:
        """The states of draft `step`, which its output head and the next step read."""
        shared = 0 if self.config.tie_weights else step
        proj = self.proj[min(step, len(self.proj) - 1)]
        mixed_RI = proj(state_RI) + self._alpha * self.emb[shared](tokens_R)
        normed_RI = F.rms_norm(mixed_RI, mixed_RI.shape[-1:], eps=_EPS)
        return F.gelu(normed_RI * self.ln[f"{shared}_weight"] + self.ln[f"{shared}_bias"])

    def logits(self, state_RI: Tensor, step: int) -> Tensor:
        """[R, V]"""
        logits_RV: Tensor = self.head[0 if self.config.tie_weights else step](state_RI)
        return logits_RV

    def config_json(self) -> dict[str, Any]:
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            **asdict(self.config),
        }

    def published(self) -> dict[str, Tensor]:
        return {
            "speculator." + name.replace("_weight", ".weight").replace("_bias", ".bias"): value
            for name, value in self.state_dict().items()
        }
