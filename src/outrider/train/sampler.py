"""The target's own text in bulk: many rows at once, static KV, one CUDA graph per context bucket.

In use a drafter continues text of the target, so this text is on-policy data. The loop decodes a
Llama-shaped model with preallocated buffers, so that on a GPU a step is one graph replay. Other
architectures use transformers' own `generate`.

Shapes: B rows, T positions, K kv heads, G query heads per kv head, D head size, H hidden, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_BUCKET = 256


def generate_rows(
    model: Any,
    prompts_BP: Tensor,
    length: int,
    temperature_B: Tensor,
    seed: int,
    tell: Callable[[int], None] = lambda position: None,
) -> Tensor:
    """Continue each prompt to `length` tokens, past any end-of-text; int64 [B, length].

    `temperature_B` may differ by row; 0 is greedy. Same result for the same seed on the same
    device. `tell` gets the position that all rows have reached (not of other architectures).
    """
    if model.config.model_type == "llama":
        return _StaticDecoder(model, prompts_BP, length, temperature_B).run(seed, tell)
    return _generate_any(model, prompts_BP, length, temperature_B, seed)


class _StaticDecoder:
    """Decodes Llama weights with preallocated KV. The model is only read."""

    def __init__(self, model: Any, prompts_BP: Tensor, length: int, temperature_B: Tensor) -> None:
        config = model.config
        weight = model.model.embed_tokens.weight
        device, dtype = weight.device, weight.dtype
        num_rows, self.num_prompt = prompts_BP.shape
        self.model, self.length, self.eps = model, length, config.rms_norm_eps
        self.K = config.num_key_value_heads
        self.G = config.num_attention_heads // self.K
        self.D = config.head_dim
        shape = (config.num_hidden_layers, num_rows, self.K, length, self.D)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.tokens_BT = torch.zeros(num_rows, length, dtype=torch.long, device=device)
        self.tokens_BT[:, : self.num_prompt] = prompts_BP.to(device)
        self.temperature_B1 = temperature_B.to(device, torch.float32)[:, None]
        self.position_1 = torch.zeros(1, dtype=torch.long, device=device)
        positions_1T = torch.arange(length, device=device)[None]
        cos, sin = model.model.rotary_emb(self.keys[0, :1, 0, :, :], positions_1T)
        self.cos_TD, self.sin_TD = cos[0].to(dtype), sin[0].to(dtype)
        self.qkv = [
            torch.cat([layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight,
                       layer.self_attn.v_proj.weight])
            for layer in model.model.layers
        ]  # fmt: skip

    @torch.no_grad()
    def run(self, seed: int, tell: Callable[[int], None] = lambda position: None) -> Tensor:
        torch.manual_seed(seed)
        for start in range(0, self.length - 1, _BUCKET):
            num_steps = min(_BUCKET, self.length - 1 - start)
            context = min(start + _BUCKET, self.length)
            self._run_bucket(num_steps, context, start, tell)
        return self.tokens_BT

    def _run_bucket(
        self, num_steps: int, context: int, start: int, tell: Callable[[int], None]
    ) -> None:
        tell(start)
        if not self.keys.is_cuda:
            for step in range(num_steps):
                self._step(context)
                tell(start + step + 1)
            return
        before = self.position_1.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(context)
        torch.cuda.current_stream().wait_stream(side)
        # The first replay overwrites everything that the warm-up step wrote.
        self.position_1.copy_(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(context)
        for _ in range(num_steps):
            graph.replay()

    def _step(self, context: int) -> None:
        """One token for every row: reads position p, writes KV at p and the token at p + 1."""
        hidden_BH = self.model.model.embed_tokens(
            self.tokens_BT.index_select(1, self.position_1)[:, 0]
        )
        visible_T = torch.arange(context, device=hidden_BH.device) <= self.position_1
        mask_T = torch.zeros(context, device=hidden_BH.device, dtype=hidden_BH.dtype)
        mask_T = mask_T.masked_fill(~visible_T, float("-inf"))
        for index in range(len(self.qkv)):
            hidden_BH = self._layer(index, hidden_BH, mask_T, context)
        normed_BH = F.rms_norm(
            hidden_BH, hidden_BH.shape[-1:], self.model.model.norm.weight, self.eps
        )
        logits_BV = self.model.lm_head(normed_BH).float()
        noise_BV = -torch.empty_like(logits_BV).exponential_().log_()
        drawn_B = (logits_BV + self.temperature_B1 * noise_BV).argmax(-1)
        following_1 = self.position_1 + 1
        given_B = self.tokens_BT.index_select(1, following_1)[:, 0]
        next_B = torch.where(following_1 < self.num_prompt, given_B, drawn_B)
        self.tokens_BT.index_copy_(1, following_1, next_B[:, None])
        self.position_1.add_(1)

    def _layer(self, index: int, hidden_BH: Tensor, mask_T: Tensor, context: int) -> Tensor:
        layer = self.model.model.layers[index]
        num_rows, size = hidden_BH.shape
        normed_BH = F.rms_norm(hidden_BH, (size,), layer.input_layernorm.weight, self.eps)
        heads = F.linear(normed_BH, self.qkv[index]).view(num_rows, -1, self.D)
        query, key, value = torch.split(heads, [self.K * self.G, self.K, self.K], dim=1)
        cos_D = self.cos_TD.index_select(0, self.position_1)
        sin_D = self.sin_TD.index_select(0, self.position_1)
        query, key = _rotate(query, cos_D, sin_D), _rotate(key, cos_D, sin_D)
        self.keys[index].index_copy_(2, self.position_1, key[:, :, None])
        self.values[index].index_copy_(2, self.position_1, value[:, :, None])
        mixed = F.scaled_dot_product_attention(
            query.reshape(num_rows, self.K, self.G, self.D),
            self.keys[index][:, :, :context],
            self.values[index][:, :, :context],
            attn_mask=mask_T.expand(num_rows, self.K, self.G, context),
        )
        hidden_BH = hidden_BH + layer.self_attn.o_proj(mixed.reshape(num_rows, -1))
        normed_BH = F.rms_norm(hidden_BH, (size,), layer.post_attention_layernorm.weight, self.eps)
        mixed_BH: Tensor = hidden_BH + layer.mlp(normed_BH)
        return mixed_BH


def _rotate(x_BND: Tensor, cos_1D: Tensor, sin_1D: Tensor) -> Tensor:
    first, second = x_BND.chunk(2, dim=-1)
    return x_BND * cos_1D + torch.cat([-second, first], dim=-1) * sin_1D


@torch.no_grad()
def _generate_any(
    model: Any, prompts_BP: Tensor, length: int, temperature_B: Tensor, seed: int
) -> Tensor:
    """Through transformers, one call per temperature; short rows end in end-of-text."""
    torch.manual_seed(seed)
    device = next(model.parameters()).device
    end = model.config.eos_token_id
    end = end[0] if isinstance(end, list) else end
    tokens_BT = torch.full((len(prompts_BP), length), end or 0, dtype=torch.long)
    for temperature in sorted(set(temperature_B.tolist())):
        chosen = (temperature_B == temperature).nonzero()[:, 0]
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
        prompts = prompts_BP[chosen].to(device)
        rows = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=length - prompts.shape[1],
            top_k=0 if temperature > 0 else None,
            pad_token_id=end or 0,
            **sampling,
        ).cpu()
        tokens_BT[chosen, : rows.shape[1]] = rows
    return tokens_BT


def prompts(tokens: Tensor, num_rows: int, num_prompt: int, seed: int) -> Tensor:
    """`num_rows` random pieces of a token stream, [num_rows, num_prompt]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - num_prompt, (num_rows,), generator=generator)
    index = starts[:, None] + torch.arange(num_prompt)
    return tokens[index.to(tokens.device)].long()


def temperatures(num_rows: int, shares: dict[float, float]) -> Tensor:
    """A temperature per row, in the given shares, interleaved."""

    def spread() -> Iterator[float]:
        owed = dict.fromkeys(shares, 0.0)
        for _ in range(num_rows):
            for temperature, share in shares.items():
                owed[temperature] += share
            chosen = max(owed, key=lambda temperature: owed[temperature])
            owed[chosen] -= sum(shares.values())
            yield chosen

    return torch.tensor(list(spread()))
