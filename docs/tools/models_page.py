"""docs/reference/models.md: which model types run where."""

from __future__ import annotations

from outrider.model.families import FAMILIES, DecoderConfig, read_decoder_config
from outrider.model.families.description import unlike
from outrider.model.native_decoder import RUNS

# Sizes that fit the defaults of every family.
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 4096),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "moe_intermediate_size"), 256),
    "vocab_size": 128,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}

_ABOUT = """\
Three paths run a model. `--backend auto` takes the first that can:

1. The **native step**, on a CPU: the model types below in float32, bfloat16, int8 and int4. Rows
   do not depend on the batch, so that drafts change no bit.
2. The **torch decoder**: the model types below on any device. On a GPU, models that are like
   Llama run on our Triton kernels, the others in torch.
3. **transformers**, with our KV store: any other causal model whose attention can be replaced. A
   self-check at load refuses a model whose drafts cannot be verified exactly. If a window stands
   in the model's mask only, the context ends where the window does.

The tests compare every model type below with transformers on tiny random models: logits of whole
texts, of pieces over a paged KV store and of trees of drafts. A sample is decoded with and
without drafts; the tokens are the same.

Of models that also see images, the text part of Gemma 3, Llama 4, Mistral 3 and Qwen 3.5 runs on
the first two paths.

Types with the part `mixer` have recurrent layers; `mixing` says in which layers. They draft with
every proposer, chains and trees; `quantized` needs the native step.
[Recurrent state](../explanation/recurrent-state.md) explains how it stays exact.

Refused are models with a recurrent state that are not below, and models whose class in transformers
ignores the attention setting (XGLM, BioGPT and others) and that are not below.

A rope of type `longrope` changes all keys past its original length, and one of type `dynamic`
past the configured one: the context ends there.
"""


def _described(model_type: str) -> DecoderConfig:
    return read_decoder_config({"model_type": model_type, **_SIZES})


def rows() -> list[list[object]]:
    found: list[list[object]] = []
    for model_type in sorted(FAMILIES):
        config = _described(model_type)
        parts = ", ".join(f"`{name}`" for name in config.deviations) or "none"
        native = "no: " + unlike(config, RUNS) if unlike(config, RUNS) else "yes"
        found.append([f"`{model_type}`", f"`{FAMILIES[model_type].architecture}`", native, parts])
    return found


def about() -> list[str]:
    return ["# Models", "", *_ABOUT.splitlines()]
