"""The tensors that a description implies, and their shapes."""

from __future__ import annotations

from outrider.model.families.description import DecoderConfig, Latent


def layer_shapes(config: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer, without experts, under Llama's names, and their shapes.

    `attention_out_norm` and `mlp_out_norm` are the norms of what attention and MLP add. `mlp` is
    the MLP beside the experts in a layer that has some.
    """
    config, attends = config.of_layer(layer), config.has_attention(layer)
    hidden, inner, dim = config.hidden_size, config.inner_size(layer), config.head_dim
    num_q, num_kv = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)

    for name in norm_names(config, layer):
        if config.norm_weight:
            shapes[f"{name}.weight"] = (hidden,)
        if config.norm_bias:
            shapes[f"{name}.bias"] = (hidden,)
    if config.mixer is not None and config.has_state(layer):
        shapes |= config.mixer.shapes(hidden)
    if attends and config.latent is not None:
        shapes |= _latent_shapes(config, config.latent)
    elif attends:
        linear("self_attn.q_proj", num_q, hidden, config.qkv_bias)
        if config.attention_gate:
            linear("self_attn.q_gate", num_q, hidden, config.qkv_bias)
        if config.has_kv(layer):
            linear("self_attn.k_proj", num_kv, hidden, config.qkv_bias)
            if not (config.values_of_keys and config.values_of_keys[layer]):
                linear("self_attn.v_proj", num_kv, hidden, config.qkv_bias)
        linear("self_attn.o_proj", hidden, num_q, config.has_o_bias(layer))
    if config.qk_norm and not config.qk_unit and attends:
        widths = {"q": num_q} | ({"k": num_kv} if config.has_kv(layer) else {})
        for which, width in widths.items():
            shapes[f"self_attn.{which}_norm.weight"] = (dim if config.qk_span == "head" else width,)
    if config.sinks and attends:
        shapes["self_attn.sinks"] = (config.num_heads,)
    for around in (config.layer_inputs, config.streams):
        shapes |= {} if around is None else around.layer_shapes(hidden)
    if config.experts is not None and config.has_experts(layer):
        shapes |= config.experts.extra_shapes(hidden)
    if not inner:
        return shapes
    if config.gated:
        linear("mlp.gate_proj", inner, hidden, config.mlp_bias)
    linear("mlp.up_proj", inner, hidden, config.mlp_bias)
    linear("mlp.down_proj", hidden, inner, config.mlp_bias)
    return shapes


def _latent_shapes(config: DecoderConfig, latent: Latent) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.num_heads
    q_rows, at = heads * (latent.rope + latent.nope), "self_attn."
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}kv_a_proj_with_mqa.weight": (latent.kv_rank + latent.rope, hidden),
        f"{at}kv_a_layernorm.weight": (latent.kv_rank,),
        f"{at}kv_b_proj.weight": (heads * (latent.nope + latent.value), latent.kv_rank),
        f"{at}o_proj.weight": (hidden, heads * latent.value),
    }
    if not latent.q_rank:
        return shapes | {f"{at}q_proj.weight": (q_rows, hidden)}
    return shapes | {
        f"{at}q_a_proj.weight": (latent.q_rank, hidden),
        f"{at}q_a_layernorm.weight": (latent.q_rank,),
        f"{at}q_b_proj.weight": (q_rows, latent.q_rank),
    }


def norm_names(config: DecoderConfig, layer: int) -> list[str]:
    """The norms of a layer over the hidden size."""
    names = []
    before, after = config.norm_before, config.norm_after
    if config.norms_out:
        before, after = not config.norms_out[layer], config.norms_out[layer]
    if before:
        begins = bool(config.norm_stays) and not config.norm_stays[layer][0]
        if config.mixes(layer) and not begins:
            names.append("input_layernorm")
        if config.has_mlp(layer) and not config.one_norm:
            names.append("post_attention_layernorm")
    if after:
        names += ["attention_out_norm", "mlp_out_norm"]
    return names


def trunk_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of no layer, apart from embeddings, norms and head."""
    hidden = config.hidden_size
    found: dict[str, tuple[int, ...]] = {}
    if config.layer_inputs is not None:
        found |= config.layer_inputs.trunk_shapes(hidden, config.num_layers)
    return found | ({} if config.streams is None else config.streams.trunk_shapes(hidden))


def count_parameters(config: DecoderConfig) -> int:
    """The numbers that a checkpoint of this description holds."""
    hidden = config.hidden_size
    total = sum(map(_product, trunk_shapes(config).values()))
    for layer in range(config.num_layers):
        total += sum(_product(shape) for shape in layer_shapes(config, layer).values())
        total += _expert_parameters(config, layer)
    norms = 1 + config.embedding_norm
    total += norms * hidden * (config.norm_weight + config.norm_bias)
    total += config.vocab_size * (hidden * (1 if config.tied else 2) + config.head_bias)
    return total + config.position_rows * hidden * (not config.sinusoids)


def _expert_parameters(config: DecoderConfig, layer: int) -> int:
    """Choice biases do not count: they are no parameters in transformers, either."""
    experts = config.experts
    if experts is None or not experts.layers[layer]:
        return 0
    hidden, inner = config.hidden_size, experts.inner
    one = (2 + config.gated) * hidden * inner + (2 * inner + hidden) * experts.bias
    return experts.count * (hidden + one + experts.router_bias) + hidden * experts.shared_gate


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
