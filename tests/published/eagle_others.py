"""EAGLE-1, with the weights of EAGLE-2, and P-EAGLE."""

from __future__ import annotations

from pathlib import Path

from published.cases import (
    H,
    L,
    Reference,
    V,
    W,
    case,
    eagle1,
    eagle3,
    layer,
    llama,
    rand,
    speculators,
    write,
)
from published.references import Eagle


@case("p-eagle")
def p_eagle_speculators(folder: Path) -> Reference:
    w = eagle3(depth=2) | {"embed_tokens.weight": rand("own embedding", V, H),
                           "mask_hidden": rand("mask", 1, 1, 3 * H) * 9}  # fmt: skip
    config = speculators("peagle", llama(num_hidden_layers=2, head_dim=8), mask_token_id=63,
                         norm_before_residual=False, embed_requires_grad=True)  # fmt: skip
    write(folder, config, w)
    return Eagle(w, (2, 4, 5), windows=(None, None), mask=63)


@case("p-eagle")
def p_eagle_specforge(folder: Path) -> Reference:
    w = eagle3(depth=2) | {"embed_tokens.weight": rand("own embedding", V, H),
                           "mask_hidden": rand("mask", 1, 1, 3 * H) * 9}  # fmt: skip
    config = llama(architectures=["PEagleDraftModel"], num_hidden_layers=2, draft_vocab_size=W,
                   pard_token=62)  # fmt: skip
    write(folder, config, w)
    return Eagle(w, (2, 4, 5), windows=(None, None), mask=62)


@case("eagle")
def eagle1_with_bias(folder: Path) -> Reference:
    w = eagle1()
    write(folder, llama(architectures=["LlamaForCausalLM"]), w, file="pytorch_model.bin")
    return Eagle(w, projects=True)


@case("eagle")
def eagle1_without_bias(folder: Path) -> Reference:
    w = eagle1(bias=False)
    write(folder, llama(architectures=["LlamaForCausalLM"], bias=False), w)
    return Eagle(w, projects=True)


@case("eagle")
def eagle1_sglang_two_layers(folder: Path) -> Reference:
    w = eagle1(depth=2)
    config = llama(architectures=["LlamaForCausalLMEagle"], num_hidden_layers=2)
    write(folder, config, w)
    return Eagle(w, windows=(None, None), projects=True)


@case("eagle")
def eagle1_vllm(folder: Path) -> Reference:
    w = eagle1()
    config = {"model_type": "eagle", "architectures": ["EAGLEModel"], "eagle_fc_bias": True,
              "truncated_vocab_size": V, "model": llama()}  # fmt: skip
    write(folder, config, w)
    return Eagle(w, projects=True)


@case("eagle")
def eagle1_speculators(folder: Path) -> Reference:
    """With the bias of HASS; the layers' config is the verifier's."""
    w = eagle1()
    del w["embed_tokens.weight"]
    config = speculators("eagle", llama(num_hidden_layers=L), fusion_bias=True, layernorms=False,
                         transformer_layer_architecture="LlamaDecoderLayer")  # fmt: skip
    for name in ("draft_vocab_size", "target_hidden_size"):
        del config[name]
    config["architectures"] = ["EagleSpeculator", "LlamaDecoderLayer"]
    stored = {name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): t
              for name, t in w.items()}  # fmt: skip
    write(folder, config, stored)
    return Eagle(w, projects=True)


@case("eagle")
def eagle1_mistral(folder: Path) -> Reference:
    w = eagle1(bias=False) | layer("layers.0.") | {"norm.weight": rand("norm", H)}
    stored = {name.replace("fc.", "eagle_linear."): t for name, t in w.items()}
    write(folder, llama(architectures=["LlamaForCausalLM"], bias=False), stored)
    return Eagle(w, projects=True, norm_output=True)
