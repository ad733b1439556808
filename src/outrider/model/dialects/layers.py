"""What all dialects with Llama's or Qwen3's layers share: sizes, biases, norms, rope, windows."""

from __future__ import annotations

from typing import Any

import torch

from outrider.errors import ModelError
from outrider.model.dialects.folder import Fields, Tensors
from outrider.model.rope import read_rope


def read_layers(
    fields: Fields, tensors: Tensors, first: str, *, theta: float = 1e4
) -> dict[str, Any]:
    """The fields of a head's config that describe its layers. `first` is the prefix of layer 0.

    Where config.json is silent, the tensors decide. `theta`: the base of rope where none is named.
    """
    fields.must_be("hidden_act", "silu", "swish")
    fields.must_be("mlp_bias", False)
    fields.must_be("quantization_config")
    hidden_size = fields.number("hidden_size")
    heads = fields.number("num_attention_heads")
    head_dim = fields.number("head_dim", hidden_size // heads)
    attention = f"{first}self_attn."
    if f"{attention}kv_a_proj_with_mqa.weight" in tensors:
        raise ModelError(f"{fields.folder} has MLA layers like DeepSeek's, which is another model")
    kv_rows = tensors.shape(f"{attention}k_proj.weight")[0]
    query_rows = tensors.shape(f"{attention}q_proj.weight")[0]
    if query_rows != heads * head_dim:
        raise ModelError(
            f"{fields.folder}: config.json implies {heads} heads of {head_dim}, the tensors have "
            f"{query_rows} rows of queries; the two do not belong together"
        )
    is_biased = f"{attention}q_proj.bias" in tensors
    if fields.switch("attention_bias") and not is_biased:
        raise ModelError(
            f"{fields.folder} lacks the tensor {attention}q_proj.bias that attention_bias asks for"
        )
    positions = fields.number("max_position_embeddings", 2048)
    values = dict(fields.values)
    if not values.get("rope_theta") and not values.get("rope_parameters"):
        values["rope_theta"] = theta
    fields.ignore("rope_theta", "rope_scaling", "rope_parameters")
    fields.ignore("original_max_position_embeddings")
    return {
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.number("num_key_value_heads", kv_rows // head_dim),
        "head_dim": head_dim,
        "intermediate_size": fields.number("intermediate_size"),
        "max_position_embeddings": positions,
        "rope": read_rope(values, positions),
        "rms_norm_eps": float(fields.get("rms_norm_eps", 1e-6)),
        "attention_bias": is_biased,
    }


def read_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer; None: it sees everything."""
    uses = fields.get("use_sliding_window")
    window = None if uses is False else fields.get("sliding_window")
    fields.ignore("sliding_window")
    types = fields.get("layer_types")
    if types is None:
        # Mistral's configs mean their window, Qwen's need the switch, Llama's need layer_types.
        first = 0 if fields.values.get("model_type") == "mistral" else num_layers
        if uses:
            first = fields.number("max_window_layers", 28)
        return tuple(
            int(window) if window and layer >= first else None for layer in range(num_layers)
        )
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) < num_layers or set(types) - set(known):
        raise fields.wrong("layer_types", f"one of {' or '.join(known)} for each layer")
    if known[1] in types[:num_layers] and not window and uses is not False:
        raise fields.wrong("sliding_window", "a number of tokens")
    return tuple(
        int(window) if window and kind == known[1] else None for kind in types[:num_layers]
    )


def read_vocabulary(fields: Fields, tensors: Tensors, vocab_size: int) -> int:
    """The size of the draft vocabulary. Raises ModelError for a `d2t` that cannot be right.

    Leaves `lm_head.weight` and, beside it, `d2t` in `tensors`; neither means the target's head.
    """
    tied = fields.switch("tie_word_embeddings")
    rows = tensors.shape("lm_head.weight")[0] if "lm_head.weight" in tensors else None
    if tied and "embed_tokens.weight" in tensors and rows in (None, vocab_size):
        tensors.replace("lm_head.weight", tensors.get("embed_tokens.weight"))
        rows = vocab_size
    size = fields.number("draft_vocab_size", rows or vocab_size)
    if rows is None:
        if size != vocab_size:
            raise ModelError(f"{fields.folder} has {size} draft ids and no lm_head.weight")
        tensors.drop("d2t")
        return vocab_size
    if size != rows:
        raise ModelError(
            f"{fields.folder}: draft_vocab_size is {size}, but lm_head.weight has {rows} rows"
        )
    if "d2t" not in tensors:
        if rows != vocab_size:
            raise ModelError(
                f"{fields.folder} drafts {rows} of {vocab_size} ids and lacks the tensor d2t, "
                "which says which"
            )
        tensors.replace("d2t", torch.zeros(rows, dtype=torch.int64))
    offsets = tensors.get("d2t").to(torch.int64)
    if offsets.shape != (rows,):
        raise ModelError(f"{fields.folder}: d2t has shape {list(offsets.shape)}, not [{rows}]")
    ids = torch.arange(rows) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ModelError(f"{fields.folder}: d2t leads out of the target's {vocab_size} ids")
    if len(set(ids.tolist())) != rows:
        raise ModelError(f"{fields.folder}: d2t names a target id twice")
    return rows


def check_mask_token(fields: Fields, token: Any, vocab_size: int) -> int:
    """The mask token's id; ModelError for one that is not in the target's vocabulary."""
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise ModelError(
            f"{fields.folder}: config.json names mask_token_id {token!r}, which is none of the "
            f"target's {vocab_size} ids"
        )
    return token
