"""EAGLE-3 as SafeAILab, SpecForge, SGLang, AngelSlim, NVIDIA and DeepSpec write it; P-EAGLE.

They differ in names and in how they count taps. vLLM's field at the top of config.json has taps;
SGLang's, inside `eagle_config`, and DeepSpec's have layers, counted from 0: their output is the tap
with the next number.
"""

from __future__ import annotations

from outrider.errors import ModelError
from outrider.model.dialects.folder import Fields, Tensors
from outrider.model.dialects.layers import (
    check_mask_token,
    read_layers,
    read_vocabulary,
    read_windows,
)
from outrider.model.eagle_head import Eagle3Config, Eagle3Head, usual_taps

_AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
_MASK_FIELDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def read_eagle3(fields: Fields, tensors: Tensors, num_layers: int | None) -> Eagle3Head:
    """`num_layers` is the target's: it gives the taps where config.json names none."""
    _rename(tensors)
    inner = fields.inner("eagle_config")
    layers = read_layers(fields, tensors, "layers.0.")
    hidden_size, vocab_size = layers["hidden_size"], fields.number("vocab_size")
    depth = fields.number("num_hidden_layers", 1)
    fields.ignore(
        "num_layers", "fc_norm", "norm_before_fc", "use_aux_norm", "num_aux_hidden_states"
    )
    inner.ignore("norm_before_fc", "num_aux_hidden_states", "fc_norm")
    fields.ignore("bias")
    inner.ignore("bias")
    # Switches of NVIDIA's trainer: these values make the layer of the paper.
    inner.must_be("use_input_layernorm_in_first_layer", True)
    inner.must_be("use_last_layernorm", True)
    inner.must_be("use_mtp_layernorm", False)
    inner.must_be("parallel_draft_step", 1)
    aux = inner.switch("use_aux_hidden_state", fields.switch("use_aux_hidden_state", True))
    target_size = fields.number("target_hidden_size", hidden_size)
    if not aux:
        tensors.drop("fc.weight")
    if aux:
        taps = _check_taps(fields, tensors, _taps(fields, inner, num_layers), target_size)
    else:
        taps = (last_tap(fields, num_layers),)
    mask = _mask_token(fields, vocab_size) if "mask_hidden" in tensors else None
    config = Eagle3Config(
        **layers,
        vocab_size=vocab_size,
        draft_vocab_size=read_vocabulary(fields, tensors, vocab_size),
        taps=taps,
        num_hidden_layers=depth,
        target_hidden_size=None if target_size == hidden_size else target_size,
        windows=_or_none(read_windows(fields, depth)),
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        output_bias="layers.0.self_attn.o_proj.bias" in tensors,
        fc_bias="fc.bias" in tensors,
        logit_scale=float(fields.get("logit_scale", 1.0)),
        reads_last_state=not aux,
        num_fc_norms=sum(name.startswith("fc_norm.") for name in tensors),
        input_norm="input_norm.weight" in tensors,
        norm_before_residual=_switch(fields, inner, "norm_before_residual"),
        norm_output=_switch(fields, inner, "norm_output"),
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        mask_token_id=mask,
    )
    _check_norms(fields, inner, config)
    if config.target_hidden_size and not config.own_embedding:
        raise ModelError(
            f"{fields.folder} is {hidden_size} wide beside a target of {target_size} and lacks "
            "embed_tokens.weight"
        )
    if mask is not None:
        tensors.replace("mask_hidden", tensors.get("mask_hidden").flatten())
    inner.finish()
    return Eagle3Head(config)


def _rename(tensors: Tensors) -> None:
    """One set of names: layers.N., fc_norm.N., and input_layernorm in all layers."""
    tensors.rename("midlayer.", "layers.0.")
    for number, name in enumerate(_AUX_NORMS):
        tensors.rename(f"{name}.", f"fc_norm.{number}.")
    for name in tensors:
        layer, _, rest = name.removeprefix("layers.").partition(".")
        if rest == "hidden_norm.weight" and layer != "0":  # SGLang's deeper layers
            tensors.rename(name, f"layers.{layer}.input_layernorm.weight")


def last_tap(fields: Fields, num_layers: int | None) -> int:
    """The tap of a head that reads the target's last state."""
    if num_layers is None:
        raise ModelError(f"{fields.folder} reads its target's last layer: name the target as well")
    return num_layers


def _taps(fields: Fields, inner: Fields, num_layers: int | None) -> tuple[int, ...] | None:
    """None: config.json names none, and the target that would decide is not known."""
    name = "eagle_aux_hidden_state_layer_ids"
    top, nested = fields.numbers(name), inner.numbers(name)
    shifted = None if nested is None else tuple(layer + 1 for layer in nested)
    if top is not None and shifted is not None and top != shifted:
        raise ModelError(
            f"{fields.folder}: config.json names taps {list(top)} in {name} and layers "
            f"{list(nested or ())} in eagle_config, which are taps {list(shifted)}: remove one"
        )
    deepspec = fields.numbers("target_layer_ids")
    if deepspec is not None:
        return tuple(layer + 1 for layer in deepspec)
    if top is not None or shifted is not None:
        return top if top is not None else shifted
    return None if num_layers is None else usual_taps(num_layers)


def _check_taps(
    fields: Fields, tensors: Tensors, taps: tuple[int, ...] | None, target_size: int
) -> tuple[int, ...]:
    width = tensors.shape("fc.weight")[1]
    if taps is None or len(taps) * target_size != width:
        count = width / target_size
        named = "no taps" if taps is None else f"{len(taps)} taps"
        raise ModelError(
            f"{fields.folder}: fc.weight reads {count:g} hidden states of width {target_size}, "
            f"but config.json names {named}"
        )
    if min(taps) < 0:
        raise ModelError(f"{fields.folder}: config.json names layer {min(taps)}, which is none")
    return taps


def _check_norms(fields: Fields, inner: Fields, config: Eagle3Config) -> None:
    """Refuses a switch for a norm whose tensors are not stored."""
    before = any(holder.values.get("norm_before_fc") for holder in (fields, inner))
    each = any(fields.values.get(name) for name in ("fc_norm", "use_aux_norm"))
    for wanted, stored, name in (
        (before, config.input_norm, "input_norm.weight"),
        (each, config.num_fc_norms > 0, "fc_norm.0.weight"),
    ):
        if wanted and not stored:
            raise ModelError(f"{fields.folder} lacks the tensor {name} that config.json asks for")
    if config.input_norm and config.num_fc_norms:
        raise ModelError(f"{fields.folder} has both input_norm and fc_norm: only one can be used")


def _mask_token(fields: Fields, vocab_size: int) -> int:
    """P-EAGLE's mask token, under the first of its names."""
    dflash = fields.inner("dflash_config")
    token = dflash.get("mask_token_id")
    dflash.finish()
    for name in _MASK_FIELDS:
        other = fields.get(name)
        token = other if token is None else token
    if token is None:
        raise ModelError(
            f"{fields.folder} drafts in parallel, but config.json names no mask_token_id: add it"
        )
    return check_mask_token(fields, token, vocab_size)


def _switch(fields: Fields, inner: Fields, name: str) -> bool:
    return inner.switch(name, fields.switch(name))


def _or_none(windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    return windows if any(windows) else ()
