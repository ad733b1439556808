"""Writes a Llama-shaped folder as GGUF, for llama.cpp. Needs the package `gguf`.

    python benchmarks/gguf_convert.py FOLDER OUT.gguf [f32|q8_0]

Give llama.cpp token ids, not text: it does not know the bundled tokenizer's way to cut text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

Floats = npt.NDArray[np.float32]
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight: Floats, num_heads: int) -> Floats:
    """Rotary halves interleaved, as llama.cpp rotates neighbours."""
    dim = weight.shape[0] // num_heads
    halves = weight.reshape(num_heads, 2, dim // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def convert(folder: Path, out: Path, kind: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(str(out), "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    words = {i: word for word, i in tokenizer["model"]["vocab"].items()}
    words |= {added["id"]: added["content"] for added in tokenizer["added_tokens"]}
    size = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([words.get(i, f"<pad{i}>") for i in range(size)])
    writer.add_token_types([3 if i == 0 else 1 if i in words else 5 for i in range(size)])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    quantised = gguf.GGMLQuantizationType.Q8_0
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            weight: Floats = tensor.to(torch.float32).numpy()
            if name in NAMES:
                target = NAMES[name]
            else:
                layer, rest = name.removeprefix("model.layers.").split(".", 1)
                target = f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"
                if rest.startswith("self_attn.q_proj"):
                    weight = permuted(weight, heads)
                if rest.startswith("self_attn.k_proj"):
                    weight = permuted(weight, kv_heads)
            if kind == "f32" or weight.ndim == 1:
                writer.add_tensor(target, weight)
            else:
                packed = gguf.quants.quantize(weight, quantised)
                writer.add_tensor(target, packed, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), (sys.argv[3:] or ["f32"])[0])
