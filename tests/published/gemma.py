"""Gemma 4's assistant as its authors publish it; the reference is transformers' own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as t

from outrider.testing import write_tiny_tokenizer
from published.references import Draw, Shown
from tiny_models import SMALL, reference
from tiny_models import write as write_model

_NEAR, _FAR = "sliding_attention", "full_attention"
_HEADS: dict[str, Any] = {"head_dim": 8, "global_head_dim": 16, "sliding_window": 5}
TARGETS: dict[str, dict[str, Any]] = {
    "shared": {
        "layer_types": [_NEAR, _FAR, _NEAR, _NEAR, _FAR], "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
    },
    "keys_are_values": {
        "layer_types": [_NEAR, _FAR, _NEAR, _NEAR, _FAR], "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Assistant:
    target: Any
    assistant: Any

    @torch.no_grad()
    def draft(self, shown: Shown, num_tokens: int, draw: Draw) -> list[int]:
        text = shown.text
        seen = self.target(
            torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True
        )
        state, token = seen.hidden_states[-1][:, -1:], text[-1]
        drafted: list[int] = []
        for place in range(num_tokens):
            embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
            output = self.assistant(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=seen.shared_kv_states,
            )
            state, token = output.last_hidden_state, draw(output.logits[0, -1], len(text) + place)
            drafted.append(token)
        return drafted


def write(name: str, folder: Path, *, ordered: bool = False) -> tuple[Path, Path, Assistant]:
    """The target's folder, the assistant's and the reference."""
    more = {"num_hidden_layers": 5} | _HEADS | TARGETS[name]
    target = write_model(folder / "target", t.Gemma4TextConfig(**SMALL | more))
    write_tiny_tokenizer(target)
    text = t.Gemma4TextConfig(
        **SMALL
        | _HEADS
        | {"hidden_size": 16, "num_hidden_layers": 2, "layer_types": [_NEAR, _FAR]}
        | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
        | {"num_kv_shared_layers": 2}
        | {n: x for n, x in more.items() if "k_eq_v" in n or "global_key" in n}
    )
    config = t.Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=32,
        use_ordered_embeddings=ordered,
        num_centroids=8,
        centroid_intermediate_top_k=3,
    )
    torch.manual_seed(7)
    assistant = t.Gemma4AssistantForCausalLM(config).eval()
    for value in assistant.parameters():
        spread = 0.1 if value.dim() == 1 else value.shape[-1] ** -0.5
        torch.nn.init.normal_(value, float(value.dim() == 1), 2 * spread)
    for number, layer in enumerate(assistant.model.layers):
        layer.layer_scalar.fill_(0.8 + 0.1 * number)
    if ordered:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(64))
    assistant.save_pretrained(folder / "assistant")
    return target, folder / "assistant", Assistant(reference(target), assistant)
