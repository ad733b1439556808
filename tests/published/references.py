"""What published drafters draft, in plain tensors: written from the formulas, not from our code.

A reference gets the tensors under the names of EAGLE-3 and Qwen3, computes every row of the text
and of the draft anew for each token and keeps nothing.

Shapes: n rows or places, H width, D head size, T taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
Draw = Callable[[Tensor, int], int]  # logits over the target's ids and place in the text -> token


@dataclass(frozen=True)
class Shown:
    """What a drafter may see of the target and of a text without its last token's states."""

    text: list[int]
    taps: dict[int, Tensor]  # tap -> [n - 1, H]
    last: Tensor  # [n - 1, H]: after the target's last norm
    embedding: Tensor
    logits: Callable[[Tensor], Tensor]  # of the target's output head, for normalised states


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    dim: int = 8
    eps: float = 1e-6
    frequencies: Tensor = field(default_factory=lambda: 1e4 ** -(torch.arange(0, 8, 2).float() / 8))
    scale: float = 1.0  # of cos and sin


def norm(x: Tensor, weight: Tensor | float, eps: float = 1e-6) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turn(x_nKD: Tensor, positions: Tensor, shape: Shape) -> Tensor:
    angles = positions[:, None].float() * shape.frequencies
    cos, sin = (f(angles)[:, None] * shape.scale for f in (torch.cos, torch.sin))
    a, b = x_nKD.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def project(x: Tensor, w: Weights, name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def attend(
    query_in: Tensor, key_in: Tensor, places: tuple[Tensor, Tensor], seen: Tensor, w: Weights,
    at: str, shape: Shape,
) -> Tensor:  # fmt: skip
    q = project(query_in, w, f"{at}self_attn.q_proj").reshape(len(query_in), -1, shape.dim)
    k = project(key_in, w, f"{at}self_attn.k_proj").reshape(len(key_in), -1, shape.dim)
    v = project(key_in, w, f"{at}self_attn.v_proj").reshape(len(key_in), -1, shape.dim)
    if f"{at}self_attn.q_norm.weight" in w:
        q = norm(q, w[f"{at}self_attn.q_norm.weight"], shape.eps)
        k = norm(k, w[f"{at}self_attn.k_norm.weight"], shape.eps)
    q, k = turn(q, places[0], shape), turn(k, places[1], shape)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(shape.dim)
    scores = scores.masked_fill(~seen, -math.inf)
    if f"{at}self_attn.attention_sink_bias" in w:  # a score without a value
        sinks = w[f"{at}self_attn.attention_sink_bias"][:, None, None].expand(*scores.shape[:2], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
    return project(mixed, w, f"{at}self_attn.o_proj")


def mlp(x: Tensor, w: Weights, at: str) -> Tensor:
    gate = F.silu(F.linear(x, w[f"{at}mlp.gate_proj.weight"]))
    return F.linear(
        gate * F.linear(x, w[f"{at}mlp.up_proj.weight"]), w[f"{at}mlp.down_proj.weight"]
    )


def visible(num_rows: int, window: int | None) -> Tensor:
    row, column = torch.arange(num_rows)[:, None], torch.arange(num_rows)
    return (column <= row) & (column > row - (window or num_rows))


def own_or(shown: Shown, w: Weights, x: Tensor, name: str = "lm_head.weight") -> Tensor:
    """The logits by a drafter's own output head, or by the target's."""
    return F.linear(x, w[name]) if name in w else shown.logits(x)


def spread(logits: Tensor, w: Weights, vocab_size: int) -> Tensor:
    if "d2t" not in w:
        return logits
    row = torch.full((vocab_size,), -math.inf)
    row[torch.arange(len(w["d2t"])) + w["d2t"]] = logits
    return row


@dataclass(frozen=True)
class Eagle:
    """EAGLE-1 (`taps` empty and `projects`), EAGLE-3 and P-EAGLE (`mask`)."""

    w: Weights
    taps: tuple[int, ...] = ()
    shape: Shape = field(default_factory=Shape)
    windows: tuple[int | None, ...] = (None,)
    projects: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    mask: int | None = None

    def features(self, taps: list[Tensor]) -> Tensor:
        w, eps = self.w, self.shape.eps
        if "fc_norm.0.weight" in w:
            taps = [norm(tap, w[f"fc_norm.{i}.weight"], eps) for i, tap in enumerate(taps)]
        wide = torch.cat(taps, -1)
        if "input_norm.weight" in w:
            wide = norm(wide, w["input_norm.weight"], eps)
        return project(wide, w, "fc")

    def rows(self, embeds: Tensor, f: Tensor) -> Tensor:
        """The last layer's output of all rows."""
        w, eps = self.w, self.shape.eps
        places = (torch.arange(len(f)), torch.arange(len(f)))
        for layer, window in enumerate(self.windows):
            at, seen = f"layers.{layer}.", visible(len(f), window)
            if layer == 0 and not self.projects:
                u = norm(f, w["layers.0.hidden_norm.weight"], eps)
                r = u if self.norm_before_residual else f
                inner = torch.cat([norm(embeds, w["layers.0.input_layernorm.weight"], eps), u], -1)
            else:
                r = project(torch.cat([embeds, f], -1), w, "fc") if layer == 0 else r
                inner = r
                if f"{at}input_layernorm.weight" in w:
                    inner = norm(r, w[f"{at}input_layernorm.weight"], eps)
            a = r + attend(inner, inner, places, seen, w, at, self.shape)
            r = a + mlp(norm(a, w[f"{at}post_attention_layernorm.weight"], eps), w, at)
        return r

    def draft(self, shown: Shown, num_tokens: int, draw: Draw) -> list[int]:
        w, eps = self.w, self.shape.eps
        embedding = w.get("embed_tokens.weight", shown.embedding)
        scale = float(w["logit_scale"]) if "logit_scale" in w else 1.0
        f = self.features([shown.taps[tap] for tap in self.taps]) if self.taps else shown.last
        text, end = shown.text, len(shown.text)

        def guess(states: Tensor, place: int) -> int:
            normed = norm(states, w["norm.weight"], eps) if "norm.weight" in w else states
            return draw(spread(scale * own_or(shown, w, normed), w, len(shown.embedding)), place)

        if self.mask is not None:
            parts = w["mask_hidden"].flatten().chunk(len(self.taps))
            masked = self.features([part[None] for part in parts]).expand(num_tokens - 1, -1)
            following = torch.tensor(text[1:] + [self.mask] * (num_tokens - 1))
            states = self.rows(embedding[following], torch.cat([f, masked]))
            return [guess(states[end - 2 + i], end + i) for i in range(num_tokens)]
        drafted: list[int] = []
        for i in range(num_tokens):
            states = self.rows(embedding[torch.tensor([*text[1:], *drafted])], f)
            drafted.append(guess(states[-1], end + i))
            back = norm(states[-1:], w["norm.weight"], eps) if self.norm_output else states[-1:]
            f = torch.cat([f, back])
        return drafted


@dataclass(frozen=True)
class DFlash:
    w: Weights
    taps: tuple[int, ...]
    size: int
    mask: int
    shape: Shape = field(default_factory=Shape)
    windows: tuple[int | None, ...] = (None, None)
    causal: tuple[bool, ...] = (False, False)
    anchor: bool = False
    markov: str = ""

    def draft(self, shown: Shown, num_tokens: int, draw: Draw) -> list[int]:
        w, eps, end = self.w, self.shape.eps, len(shown.text)
        embedding = w.get("embed_tokens.weight", shown.embedding)
        wide = torch.cat([shown.taps[tap] for tap in self.taps], -1)
        c = norm(project(wide, w, "fc"), w["hidden_norm.weight"], eps)
        x = embedding[torch.tensor([shown.text[-1]] + [self.mask] * (self.size - 1))]
        if "mask_embedding" in w:
            x = torch.cat([x[:1], w["mask_embedding"].expand(self.size - 1, -1)])
        own, known = torch.arange(end - 1, end - 1 + self.size), torch.arange(end - 1)
        keys = torch.cat([known, own])
        for layer, (window, causal) in enumerate(zip(self.windows, self.causal, strict=True)):
            at = f"layers.{layer}."
            y = norm(x, w[f"{at}input_layernorm.weight"], eps)
            seen = (keys <= own[:, None]) if causal else torch.ones(len(own), len(keys)).bool()
            if window:
                seen = seen & ((keys - own[:, None]).abs() < window)
            x = x + attend(y, torch.cat([c, y]), (own, keys), seen, w, at, self.shape)
            x = x + mlp(norm(x, w[f"{at}post_attention_layernorm.weight"], eps), w, at)
        x = norm(x, w["norm.weight"], eps)[0 if self.anchor else 1 :]
        previous, drafted = shown.text[-1], []
        state = torch.zeros(1)
        for i in range(min(num_tokens, len(x))):
            logits = own_or(shown, w, x[i])
            if self.markov:
                e = w["markov_head.markov_w1.weight"][previous]
                if i == 0:
                    state = torch.zeros_like(e)
                if self.markov == "gated":
                    e = project(torch.cat([x[i], e]), w, "markov_head.gate_proj").sigmoid() * e
                if self.markov == "rnn":
                    joint = project(torch.cat([state, e, x[i]]), w, "markov_head.joint_proj")
                    g, new, o = joint.chunk(3)
                    state = g.sigmoid() * state + (1 - g.sigmoid()) * new.tanh()
                    e = o.tanh()
                logits = logits + F.linear(e, w["markov_head.markov_w2.weight"])
            previous = draw(spread(logits, w, len(shown.embedding)), end + i)
            drafted.append(previous)
        return drafted


@dataclass(frozen=True)
class Medusa:
    """Tensors are named as its authors name them."""

    w: Weights
    num_layers: int = 1
    num_heads: int = 4
    ids: Tensor | None = None
    scale: float = 1.0

    def draft(self, shown: Shown, num_tokens: int, draw: Draw) -> list[int]:
        drafted = []
        for head in range(min(num_tokens, self.num_heads)):
            x = shown.last[-1]
            for layer in range(self.num_layers):
                x = x + F.silu(project(x, self.w, f"{head}.{layer}.linear"))
            logits = self.scale * own_or(shown, self.w, x, f"{head}.{self.num_layers}.weight")
            if self.ids is not None:
                row = torch.full((len(shown.embedding),), -math.inf)
                row[self.ids] = logits
                logits = row
            drafted.append(draw(logits, len(shown.text) + head))
        return drafted


@dataclass(frozen=True)
class Mlp:
    w: Weights
    inner: int
    num_steps: int
    tied: bool = False
    scaled: bool = False

    def draft(self, shown: Shown, num_tokens: int, draw: Draw) -> list[int]:
        s, token, drafted = shown.last[-1], shown.text[-1], []
        if self.scaled:
            s = norm(s, 1.0) / math.sqrt(2)
        weight = 0.5 ** (0.5 / self.num_steps)
        alpha = math.sqrt((1 - weight**2) * self.inner / 2) / weight
        for step in range(min(num_tokens, self.num_steps)):
            at, proj = (0, min(step, 1)) if self.tied else (step, step)
            mixed = F.linear(s, self.w[f"proj.{proj}.weight"])
            mixed = mixed + alpha * self.w[f"emb.{at}.weight"][token]
            normed = norm(mixed, self.w[f"ln.{at}.weight"]) + self.w[f"ln.{at}.bias"]
            s = 0.5 * normed * (1 + torch.erf(normed / math.sqrt(2)))
            token = draw(F.linear(s, self.w[f"head.{at}.weight"]), len(shown.text) + step)
            drafted.append(token)
        return drafted
