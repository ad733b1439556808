"""EAGLE-3 in the layouts of its trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from gguf_files import Stored, plain
from gguf_files import write as write_gguf
from outrider.model.gguf.types import INTEGERS
from published.cases import (
    H,
    Json,
    Reference,
    Tensors,
    V,
    W,
    case,
    eagle3,
    llama,
    midlayer,
    prefixed,
    qwen3,
    rand,
    rope_shape,
    speculators,
    write,
)
from published.references import Eagle, Shape


@case("eagle3")
def safeailab(folder: Path) -> Reference:
    w = eagle3()
    config = llama(architectures=["LlamaForCausalLM"], draft_vocab_size=W, pad_token_id=0)
    write(folder, config, midlayer(w), file="pytorch_model.bin")
    return Eagle(w, (2, 4, 5))


@case("eagle3")
def specforge(folder: Path) -> Reference:
    w = eagle3() | {"embed_tokens.weight": rand("own embedding", V, H)}
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W, head_dim=8,
                   attention_bias=False, attention_dropout=0.0, max_window_layers=48,
                   sliding_window=None, use_sliding_window=False)  # fmt: skip
    write(folder, config, midlayer(w))
    return Eagle(w, (2, 4, 5))


@case("eagle3")
def sglang_nested_taps(folder: Path) -> Reference:
    w = eagle3()
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}
    write(folder, config, midlayer(w))
    return Eagle(w, (1, 4, 7))


@case("eagle3")
def vllm_top_level_taps(folder: Path) -> Reference:
    w = eagle3(4)
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W,
                   eagle_aux_hidden_state_layer_ids=[0, 3, 6, 8])  # fmt: skip
    write(folder, config, midlayer(w))
    return Eagle(w, (0, 3, 6, 8))


@case("eagle3")
def angelslim_full_vocabulary(folder: Path) -> Reference:
    w = eagle3(rows=V) | {"d2t": torch.zeros(V, dtype=torch.int64)}
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=V, rope_theta=5e5)
    write(folder, config, midlayer(w) | {"t2d": torch.ones(V, dtype=torch.bool)})
    frequencies = 5e5 ** -(torch.arange(0, 8, 2).float() / 8)
    return Eagle(w, (2, 4, 5), Shape(frequencies=frequencies))


@case("eagle3")
def nvidia_yarn(folder: Path) -> Reference:
    w = eagle3()
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64,
               "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W,
                   rope_scaling=scaling)  # fmt: skip
    config["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }  # fmt: skip
    write(folder, config, midlayer(w))
    return Eagle(w, (2, 4, 6), rope_shape(config))


@case("eagle3")
def llama3_rope(folder: Path) -> Reference:
    w = eagle3()
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
    config = llama(architectures=["LlamaForCausalLM"], draft_vocab_size=W, rope_scaling=scaling)
    write(folder, config, midlayer(w), file="pytorch_model.bin")
    return Eagle(w, (2, 4, 5), rope_shape(config))


@case("eagle3")
def deepspec(folder: Path) -> Reference:
    w = eagle3(5, rows=V, qk=True) | {"embed_tokens.weight": rand("own embedding", V, H)}
    config = qwen3(architectures=["Qwen3Eagle3Model"], target_layer_ids=[-1, 1, 3, 5, 7],
                   num_hidden_layers=1)  # fmt: skip
    write(folder, config, w)
    return Eagle(w, (0, 2, 4, 6, 8))


@case("eagle3")
def speculators_llama(folder: Path) -> Reference:
    w = eagle3() | {"embed_tokens.weight": rand("own embedding", V, H)}
    config = speculators("eagle3", llama(head_dim=8), norm_before_residual=True,
                         eagle_aux_hidden_state_layer_ids=None,
                         embed_requires_grad=False)  # fmt: skip
    write(folder, config, w | {"verifier_norm.weight": rand("v", H)})
    return Eagle(w, (2, 4, 5), norm_before_residual=True)


@case("eagle3")
def speculators_two_layers(folder: Path) -> Reference:
    w = eagle3(depth=2, qk=True) | {f"fc_norm.{i}.weight": rand(f"n{i}", H) for i in range(3)}
    layers = qwen3(rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    del layers["rope_theta"], layers["rope_scaling"]
    config = speculators("eagle3", layers, norm_before_residual=False, norm_output=True,
                         fc_norm=True, eagle_aux_hidden_state_layer_ids=[1, 4, 7])  # fmt: skip
    write(folder, config, w)
    shape = Shape(frequencies=1e6 ** -(torch.arange(0, 8, 2).float() / 8))
    return Eagle(w, (1, 4, 7), shape, windows=(None, None), norm_output=True)


@case("eagle3")
def eagle_3_1(folder: Path) -> Reference:
    w = eagle3() | {f"fc_norm.{i}.weight": rand(f"n{i}", H) for i in range(3)}
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W, fc_norm=True,
                   norm_output=True)  # fmt: skip
    write(folder, config, midlayer(w))
    return Eagle(w, (2, 4, 5), norm_output=True)


@case("eagle3")
def norm_before_fc(folder: Path) -> Reference:
    w = eagle3() | {"input_norm.weight": rand("input_norm", 3 * H)}
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W)
    config["eagle_config"] = {"norm_before_fc": True, "use_aux_hidden_state": True}
    write(folder, config, midlayer(w))
    return Eagle(w, (2, 4, 5))


@case("eagle3")
def sglang_aux_norms(folder: Path) -> Reference:
    w = eagle3() | {f"fc_norm.{i}.weight": rand(f"n{i}", H) for i in range(3)}
    names = {f"fc_norm.{i}.": f"aux_norm_{part}." for i, part in enumerate(("low", "mid", "high"))}
    stored = midlayer(w)
    for ours, theirs in names.items():
        stored[f"{theirs}weight"] = stored.pop(f"{ours}weight")
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W, use_aux_norm=True)
    write(folder, config, stored)
    return Eagle(w, (2, 4, 5))


@case("eagle3")
def sglang_deeper_layers(folder: Path) -> Reference:
    w = eagle3(depth=2)
    stored = midlayer(w)
    stored["layers.1.hidden_norm.weight"] = stored.pop("layers.1.input_layernorm.weight")
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W,
                   num_hidden_layers=2)  # fmt: skip
    write(folder, config, stored)
    return Eagle(w, (2, 4, 5), windows=(None, None))


@case("eagle3")
def no_aux_hidden_states(folder: Path) -> Reference:
    w = eagle3()
    del w["fc.weight"]
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W)
    config["eagle_config"] = {"use_aux_hidden_state": False}
    write(folder, config, midlayer(w))
    return Eagle(w)


@case("eagle3")
def narrower_than_the_target(folder: Path) -> Reference:
    w = eagle3(size=16, heads=2) | {"embed_tokens.weight": rand("own embedding", V, 16)}
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W, hidden_size=16,
                   num_attention_heads=2, num_key_value_heads=1, target_hidden_size=H)  # fmt: skip
    write(folder, config, midlayer(w))
    return Eagle(w, (2, 4, 5), Shape(heads=2))


@case("eagle3")
def biases(folder: Path) -> Reference:
    w = eagle3(bias=True) | {"fc.bias": 0.3 * rand("fc.bias", H)}
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W, bias=True,
                   attention_bias=True)  # fmt: skip
    w["layers.0.self_attn.o_proj.bias"] = 0.3 * rand("o.bias", H)
    write(folder, config, midlayer(w))
    return Eagle(w, (2, 4, 5))


@case("eagle3")
def sliding_windows(folder: Path) -> Reference:
    w = eagle3(depth=2)
    config = speculators("eagle3", llama(num_hidden_layers=2, sliding_window=5, head_dim=8,
                         layer_types=["sliding_attention", "full_attention"]),
                         norm_before_residual=False)  # fmt: skip
    write(folder, config, w)
    return Eagle(w, (2, 4, 5), windows=(5, None))


@case("eagle3")
def sliding_last_layer(folder: Path) -> Reference:
    w = eagle3()
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W, sliding_window=4,
                   layer_types=["sliding_attention"])  # fmt: skip
    write(folder, config, midlayer(w))
    return Eagle(w, (2, 4, 5), windows=(4,))


@case("eagle3")
def tied_output_head(folder: Path) -> Reference:
    w = eagle3(rows=V)
    del w["lm_head.weight"]
    w["embed_tokens.weight"] = rand("own embedding", V, H)
    config = llama(architectures=["LlamaForCausalLMEagle3"], tie_word_embeddings=True)
    write(folder, config, midlayer(w))
    return Eagle(w | {"lm_head.weight": w["embed_tokens.weight"]}, (2, 4, 5))


@case("eagle3")
def the_targets_output_head(folder: Path) -> Reference:
    w = eagle3(rows=V)
    del w["lm_head.weight"]
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=None)
    write(folder, config, midlayer(w))
    return Eagle(w, (2, 4, 5))


@case("eagle3")
def wide_heads_and_model_prefix(folder: Path) -> Reference:
    w = eagle3(dim=16)
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W, head_dim=16)
    write(folder, config, prefixed("model.", midlayer(w)))
    frequencies = 1e4 ** -(torch.arange(0, 16, 2).float() / 16)
    return Eagle(w, (2, 4, 5), Shape(dim=16, frequencies=frequencies))


@case("eagle3")
def sharded(folder: Path) -> Reference:
    w = eagle3()
    stored = midlayer(w)
    names = sorted(stored)
    files = {
        "model-00001-of-00002.safetensors": names[:4],
        "model-00002-of-00002.safetensors": names[4:],
    }
    for file, part in files.items():
        write(folder, llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W),
              {name: stored[name] for name in part}, file=file)  # fmt: skip
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return Eagle(w, (2, 4, 5))


@case("eagle3")
def half_precision_and_scaled_logits(folder: Path) -> Reference:
    w = {name: t.half() if t.is_floating_point() else t for name, t in eagle3().items()}
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W, logit_scale=2.0)
    write(folder, config, midlayer(w))
    full = {name: t.float() if t.is_floating_point() else t for name, t in w.items()}
    return Eagle(full | {"logit_scale": torch.tensor(2.0)}, (2, 4, 5))


def as_gguf(tensors: Tensors, **metadata: Any) -> tuple[Json, dict[str, Stored]]:
    """Metadata and tensors of a head, as llama.cpp's converter names them."""
    stored: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("layers.0.").removesuffix(".weight")
        if short in ("self_attn.q_proj", "self_attn.k_proj"):
            halves = tensor.reshape(-1, 2, 4, tensor.shape[-1])  # heads of 8
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if name == "d2t":
            ids = (tensor + torch.arange(len(tensor))).numpy()
            stored["d2t"] = Stored(INTEGERS[27], ids.shape, ids.astype("<i8").tobytes())
        elif name != "t2d":
            place = GGUF_NAMES.get(name) or f"blk.0.{GGUF_LAYER[short]}.weight"
            stored[place] = plain(tensor)
    shape = {
        "general.architecture": "eagle3", "eagle3.block_count": 1, "eagle3.context_length": 2048,
        "eagle3.embedding_length": H, "eagle3.feed_forward_length": 40,
        "eagle3.attention.head_count": 4, "eagle3.attention.head_count_kv": 2,
        "eagle3.attention.key_length": 8, "eagle3.attention.layer_norm_rms_epsilon": 1e-6,
        "eagle3.rope.freq_base": 10000.0, "eagle3.target_hidden_size": H,
        "eagle3.target_layers": [2, 4, 5],
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(V)],
    }  # fmt: skip
    return shape | metadata, stored


GGUF_NAMES = {"fc.weight": "fc.weight", "norm.weight": "output_norm.weight",
              "lm_head.weight": "output.weight"}  # fmt: skip
GGUF_LAYER = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def eagle3_gguf(file: Path) -> Reference:
    """As a file of llama.cpp's."""
    write_gguf(file, *as_gguf(eagle3(), **{"eagle3.norm_before_residual": True}))
    return Eagle(eagle3(), (2, 4, 5), norm_before_residual=True)
