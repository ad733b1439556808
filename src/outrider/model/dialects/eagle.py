"""EAGLE-1 and EAGLE-2, whose weights are the same: SafeAILab, SGLang, vLLM's first layout.

`fc` makes one input of embedding and last state. Layer 0 has no norm in front, none follows.
Mistral's heads call it `eagle_linear`, keep that norm and have a last one.
"""

from __future__ import annotations

from outrider.errors import ModelError
from outrider.model.dialects.eagle3 import last_tap
from outrider.model.dialects.folder import Fields, Tensors
from outrider.model.dialects.layers import read_layers, read_vocabulary, read_windows
from outrider.model.eagle_head import Eagle3Config, Eagle3Head


def read_eagle(fields: Fields, tensors: Tensors, num_layers: int | None) -> Eagle3Head:
    if fields.values.get("model_type") == "eagle" and "model" in fields:
        return _read_first_layout(fields, tensors, num_layers)
    tensors.rename("eagle_linear.", "fc.")
    is_biased = "fc.bias" in tensors
    if fields.switch("bias", is_biased) and not is_biased:
        raise ModelError(f"{fields.folder} lacks the tensor fc.bias that its bias asks for")
    depth = fields.number("num_hidden_layers", 1)
    layers = read_layers(fields, tensors, "layers.0.")
    has_norm = "norm.weight" in tensors
    vocab_size = fields.number("vocab_size")
    fields.ignore("tie_word_embeddings")  # the target's: its output head is used
    fields.values["tie_word_embeddings"] = False
    windows = read_windows(fields, depth)
    return Eagle3Head(
        Eagle3Config(
            **layers,
            vocab_size=vocab_size,
            draft_vocab_size=read_vocabulary(fields, tensors, vocab_size),
            taps=(last_tap(fields, num_layers),),
            num_hidden_layers=depth,
            windows=windows if any(windows) else (),
            qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
            output_bias="layers.0.self_attn.o_proj.bias" in tensors,
            fc_bias=is_biased,
            logit_scale=float(fields.get("logit_scale", 1.0)),
            reads_last_state=True,
            projects=True,
            first_norm="layers.0.input_layernorm.weight" in tensors,
            output_norm=has_norm,
            norm_output=has_norm,
            own_embedding="embed_tokens.weight" in tensors,
            own_head="lm_head.weight" in tensors,
        )
    )


def _read_first_layout(fields: Fields, tensors: Tensors, num_layers: int | None) -> Eagle3Head:
    """vLLM's first layout: the config above inside `model`."""
    inner = fields.inner("model")
    vocab_size = inner.number("vocab_size")
    fields.must_be("truncated_vocab_size", vocab_size)
    if "eagle_fc_bias" in fields:
        inner.values["bias"] = fields.switch("eagle_fc_bias")
    if "logit_scale" in fields:
        inner.values["logit_scale"] = fields.get("logit_scale")
    head = read_eagle(inner, tensors, num_layers)
    inner.finish()
    return head
