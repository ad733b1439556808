"""DFlash and DSpark in the layouts of their trainers."""

from __future__ import annotations

from pathlib import Path

import torch

from published.cases import (
    H,
    L,
    Reference,
    Tensors,
    V,
    W,
    case,
    dflash,
    eagle3,
    qwen3,
    rand,
    speculators,
    write,
)
from published.references import DFlash, Shape


@case("dflash")
def dflash_zlab(folder: Path) -> Reference:
    config = qwen3(architectures=["DFlashDraftModel"], block_size=7, num_target_layers=L,
                   layer_types=["full_attention"] * 2, max_window_layers=2,
                   dflash_config={"mask_token_id": 60, "target_layer_ids": [1, 6]})  # fmt: skip
    write(folder, config, dflash())
    return DFlash(dflash(), (2, 7), 7, 60)


@case("dflash")
def dflash_usual_layers(folder: Path) -> Reference:
    config = qwen3(architectures=["DFlashDraftModel"], block_size=6, num_target_layers=L,
                   num_hidden_layers=3, mask_token_id=60)  # fmt: skip
    del config["rope_theta"]
    w = dflash(3, depth=3)
    write(folder, config, w)
    shape = Shape(frequencies=1e6 ** -(torch.arange(0, 8, 2).float() / 8))
    nothing = (None,) * 3
    return DFlash(w, (2, 4, 6), 6, 60, shape, nothing, (False,) * 3)


@case("dflash")
def dflash_sliding(folder: Path) -> Reference:
    config = qwen3(architectures=["DFlashDraftModel"], block_size=7, sliding_window=5,
                   use_sliding_window=True, layer_types=["sliding_attention", "full_attention"],
                   dflash_config={"mask_token_id": 60, "target_layer_ids": [1, 6]})  # fmt: skip
    write(folder, config, dflash())
    return DFlash(dflash(), (2, 7), 7, 60, windows=(5, None), causal=(True, False))


@case("dflash")
def dflash_swa(folder: Path) -> Reference:
    config = qwen3(architectures=["DFlashDraftModel"], block_size=6)
    config["dflash_config"] = {"mask_token_id": 60, "target_layer_ids": [1, 6], "use_swa": True,
                               "swa_window_size": 9}  # fmt: skip
    write(folder, config, dflash())
    return DFlash(dflash(), (2, 7), 6, 60, windows=(9, 9))


@case("dflash")
def dflash_causal(folder: Path) -> Reference:
    config = qwen3(architectures=["DFlashDraftModel"], block_size=7, is_causal=False)
    config["dflash_config"] = {"mask_token_id": 60, "layer_ids": [1, 6], "causal": True}
    write(folder, config, dflash())
    return DFlash(dflash(), (1, 6), 7, 60, causal=(True, True))


@case("dflash")
def dflash_mask_embedding(folder: Path) -> Reference:
    config = qwen3(architectures=["DFlashDraftModel"], block_size=7)
    config["dflash_config"] = {"target_layer_ids": [1, 6]}
    write(folder, config, dflash())
    mask = rand("mask_embedding", 1, H).flatten()
    torch.save({"embedding": mask, "mask_token_id": 61}, folder / "mask_embedding.pt")
    return DFlash(dflash() | {"mask_embedding": mask}, (2, 7), 7, 61)


@case("dflash")
def dflash_sinks(folder: Path) -> Reference:
    config = qwen3(architectures=["DFlashDraftModel"], block_size=7)
    config["dflash_config"] = {"mask_token_id": 60, "target_layer_ids": [1, 6], "use_swa": True,
                               "swa_window_size": 9, "attention_sink_bias": True}  # fmt: skip
    sinks = {f"layers.{i}.self_attn.attention_sink_bias": 3 * rand(f"sinks {i}", 1, 4).flatten()
             for i in range(2)}  # fmt: skip
    write(folder, config, dflash() | sinks)
    return DFlash(dflash() | sinks, (2, 7), 7, 60, windows=(9, 9))


@case("dflash")
def dflash_muse(folder: Path) -> Reference:
    w = dflash()
    stored = w | {"encoder.fc.weight": w["fc.weight"],
                  "encoder.output_norm_enc.weight": w["hidden_norm.weight"]}  # fmt: skip
    del stored["fc.weight"], stored["hidden_norm.weight"]
    config = qwen3(architectures=["DFlashDraftModel"], block_size=6)
    config["dflash_config"] = {"mask_token_id": 60, "target_layer_ids": [1, 6]}
    write(folder, config, stored)
    return DFlash(w, (2, 7), 6, 60)


def _own_ends() -> Tensors:
    head = {name: t for name, t in eagle3().items() if name in ("lm_head.weight", "d2t", "t2d")}
    return head | {"embed_tokens.weight": rand("own embedding", V, H)}


def _markov(kind: str, rows: int) -> Tensors:
    found = {"markov_head.markov_w1.weight": rand("w1", V, 5) * 2,
             "markov_head.markov_w2.weight": rand("w2", rows, 5)}  # fmt: skip
    if kind == "gated":
        found |= {"markov_head.gate_proj.weight": rand("gate", 5, H + 5),
                  "markov_head.gate_proj.bias": rand("gate.bias", 5)}  # fmt: skip
    if kind == "rnn":
        found |= {"markov_head.joint_proj.weight": rand("joint", 15, 10 + H),
                  "markov_head.joint_proj.bias": rand("joint.bias", 15)}  # fmt: skip
    return found


@case("dflash")
def dflash_speculators(folder: Path) -> Reference:
    w = dflash() | _own_ends()
    config = speculators("dflash", qwen3(sliding_window=None), block_size=7, mask_token_id=60,
                         aux_hidden_state_layer_ids=[1, 6], sliding_window_non_causal=False,
                         sample_from_anchor=False)  # fmt: skip
    write(folder, config, w | {"verifier_norm.weight": rand("v", H)})
    return DFlash(w, (1, 6), 7, 60)


@case("dflash")
def dflash_speculators_sliding(folder: Path) -> Reference:
    w = dflash() | _own_ends()
    layers = qwen3(sliding_window=6, use_sliding_window=True,
                   layer_types=["sliding_attention", "full_attention"])  # fmt: skip
    config = speculators("dflash", layers, block_size=7, mask_token_id=60,
                         aux_hidden_state_layer_ids=[1, 6], sliding_window_non_causal=True,
                         sample_from_anchor=False)  # fmt: skip
    write(folder, config, w)
    return DFlash(w, (1, 6), 7, 60, windows=(6, None))


@case("dflash")
def deepspec_dflash(folder: Path) -> Reference:
    w = dflash(3) | {"embed_tokens.weight": rand("e", V, H), "lm_head.weight": rand("h", V, H)}
    config = qwen3(architectures=["Qwen3DSparkModel"], block_size=7, mask_token_id=60,
                   target_layer_ids=[-1, 2, 6], markov_rank=0,
                   enable_confidence_head=False, num_anchors=9)  # fmt: skip
    write(folder, config, w)
    return DFlash(w, (0, 3, 7), 7, 60, anchor=True)


@case("dflash")
def dspark_deepspec(folder: Path) -> Reference:
    w = dflash() | {"embed_tokens.weight": rand("e", V, H), "lm_head.weight": rand("h", V, H)}
    w |= _markov("vanilla", V)
    config = qwen3(architectures=["Qwen3DSparkModel"], block_size=7, mask_token_id=60,
                   target_layer_ids=[2, 6], markov_rank=5, markov_head_type="vanilla",
                   enable_confidence_head=True, confidence_head_with_markov=True)  # fmt: skip
    trust = {"confidence_head.proj.weight": rand("c", 1, H + 5),
             "confidence_head.proj.bias": rand("cb", 1)}  # fmt: skip
    write(folder, config, w | trust)
    return DFlash(w, (3, 7), 7, 60, anchor=True, markov="vanilla")


@case("dflash")
def dspark_specforge_gated(folder: Path) -> Reference:
    w = dflash() | _markov("gated", V)
    config = qwen3(architectures=["DSparkDraftModel"], block_size=6, num_target_layers=L)
    config["dflash_config"] = {
        "mask_token_id": 60, "target_layer_ids": [2, 6], "markov_rank": 5,
        "markov_head_type": "gated", "projector_type": "dspark", "attention_mode": "gqa",
        "confidence_head_alpha": 1.0, "enable_confidence_head": False,
        "confidence_head_with_markov": True,
    }  # fmt: skip
    write(folder, config, w)
    return DFlash(w, (3, 7), 6, 60, anchor=True, markov="gated")


@case("dflash")
def dspark_speculators_rnn(folder: Path) -> Reference:
    w = dflash() | _own_ends() | _markov("rnn", W)
    config = speculators("dspark", qwen3(), block_size=6, mask_token_id=60,
                         aux_hidden_state_layer_ids=[3, 7], sliding_window_non_causal=False,
                         sample_from_anchor=True, markov_rank=5, markov_head_type="rnn",
                         enable_confidence_head=True,
                         confidence_head_with_markov=False)  # fmt: skip
    trust = {"confidence_head.proj.weight": rand("c", 1, H),
             "confidence_head.proj.bias": rand("cb", 1)}  # fmt: skip
    write(folder, config, w | trust)
    return DFlash(w, (3, 7), 6, 60, anchor=True, markov="rnn")


@case("dflash")
def dspark_fill_in(folder: Path) -> Reference:
    w = dflash() | _own_ends() | _markov("vanilla", W)
    config = speculators("dspark", qwen3(), block_size=7, mask_token_id=60,
                         aux_hidden_state_layer_ids=[3, 7], sample_from_anchor=False, markov_rank=5,
                         markov_head_type="vanilla", enable_confidence_head=False,
                         confidence_head_with_markov=False)  # fmt: skip
    write(folder, config, w)
    return DFlash(w, (3, 7), 7, 60, markov="vanilla")


@case("dflash")
def dflash_our_older_files(folder: Path) -> Reference:
    w = dflash() | _markov("vanilla", V)
    names = {"markov_head.markov_w1.": "markov_embed.", "markov_head.markov_w2.": "markov_head."}
    stored = dict(dflash())
    for theirs, ours in names.items():
        stored[f"{ours}weight"] = w[f"{theirs}weight"]
    stored |= {"confidence_head.weight": rand("c", 1, H), "confidence_head.bias": rand("cb", 1)}
    config = qwen3(architectures=["DFlashDraftModel"], block_size=7)
    config["dflash_config"] = {"mask_token_id": 60, "target_layer_ids": [2, 6], "markov_rank": 5,
                               "confidence": True}  # fmt: skip
    write(folder, config, stored)
    return DFlash(w, (3, 7), 7, 60, markov="vanilla")
