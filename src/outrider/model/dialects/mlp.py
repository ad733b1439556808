"""MLP speculators as IBM and Snowflake write them."""

from __future__ import annotations

from outrider.errors import ModelError
from outrider.model.dialects.folder import Fields, Tensors
from outrider.model.mlp_head import MlpConfig, MlpHead


def read_mlp(fields: Fields, tensors: Tensors) -> MlpHead:
    method = fields.get("method", "sum_rnn")
    if method != "sum_rnn" or isinstance(fields.get("inner_dim"), str):
        raise ModelError(f"{fields.folder} is an LSTM speculator (Arctic), which is another model")
    fields.ignore("top_k_tokens_per_head", "n_candidates", "use_flashinfer")
    tensors.rename("speculator.", "")
    for name in tensors:
        part, _, rest = name.partition(".")
        if part == "ln":
            tensors.rename(name, f"ln.{rest.replace('.', '_')}")
    emb_dim, steps = fields.number("emb_dim"), fields.number("n_predict")
    fields.must_be("input_hidden_dim", emb_dim)
    tied = fields.switch("tie_weights")
    if tied:  # some writers store what is shared once for each step
        for name in tensors:
            part, step = name.split(".")[0], int(name.split(".")[1].split("_")[0])
            if step > (1 if part == "proj" else 0):
                tensors.drop(name)
    return MlpHead(
        MlpConfig(
            emb_dim=emb_dim,
            inner_dim=fields.number("inner_dim", 0) or emb_dim,
            vocab_size=fields.number("vocab_size"),
            n_predict=steps,
            tie_weights=tied,
            scale_input=fields.switch("scale_input"),
        )
    )
