"""DFlash and DSpark: as z-lab, SpecForge and DeepSpec write them, and our own older files.

`dflash_config` holds most fields; some writers put them at the top. Layer ids count from 0: their
output is the tap with the next number.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.errors import ModelError
from outrider.model.dflash_head import RENAMED, DFlashConfig, DFlashHead
from outrider.model.dialects.folder import Fields, Tensors
from outrider.model.dialects.layers import (
    check_mask_token,
    read_layers,
    read_vocabulary,
    read_windows,
)

_DSPARK = ("DSparkDraftModel", "DSparkSpeculator", "Qwen3DSparkModel")


def read_dflash(fields: Fields, tensors: Tensors, num_layers: int | None) -> DFlashHead:
    inner = fields.inner("dflash_config")
    is_ours = "markov_embed.weight" in tensors or ("markov_rank" in inner and "confidence" in inner)
    _rename(tensors, is_ours)
    layers = read_layers(fields, tensors, "layers.0.", theta=1e6)
    depth, vocab_size = fields.number("num_hidden_layers"), fields.number("vocab_size")
    size = layers["hidden_size"]
    target_size = fields.number("target_hidden_size", size)
    windows, causal = _attention(fields, inner, depth)
    mask_token = _either(fields, inner, "mask_token_id")
    stored = _read_mask_embedding(fields, tensors)
    mask_token = mask_token if stored is None else stored
    if mask_token is None:
        raise ModelError(f"{fields.folder}: config.json names no mask_token_id")
    rows = read_vocabulary(fields, tensors, vocab_size)
    config = DFlashConfig(
        **layers,
        vocab_size=vocab_size,
        taps=_taps(fields, inner, depth, num_layers),
        mask_token_id=check_mask_token(fields, mask_token, vocab_size),
        num_hidden_layers=depth,
        block_size=_block_size(fields, inner),
        **_dspark(fields, inner, tensors),
        target_hidden_size=None if target_size == size else target_size,
        windows=windows if any(windows) else (),
        causal=causal if any(causal) else (),
        output_bias="layers.0.self_attn.o_proj.bias" in tensors,
        sinks=inner.switch("attention_sink_bias"),
        samples_from_anchor=_samples_from_anchor(fields, inner, is_ours),
        draft_vocab_size=rows if "lm_head.weight" in tensors else None,
        own_embedding="embed_tokens.weight" in tensors,
        mask_embedding="mask_embedding" in tensors,
    )
    for name in ("attention_mode", "projector_type"):
        inner.must_be(name, {"attention_mode": "gqa", "projector_type": "dspark"}[name], "dflash")
    inner.ignore("confidence_head_alpha", "num_anchors")
    fields.ignore("confidence_head_alpha", "num_target_layers")
    if target_size != size and not config.own_embedding:
        raise ModelError(
            f"{fields.folder} is {size} wide beside a target of {target_size} and lacks "
            "embed_tokens.weight"
        )
    _check_taps(fields, tensors, config)
    inner.finish()
    return DFlashHead(config)


def _block_size(fields: Fields, inner: Fields) -> int:
    size = _either(fields, inner, "block_size")
    if not isinstance(size, int) or size < 2:
        raise fields.wrong("block_size", "a number of tokens above 1")
    return size


def _rename(tensors: Tensors, is_ours: bool) -> None:
    tensors.rename("logit_scale_head.", "logit_head.")
    tensors.rename("logit_head.", "")  # early SpecForge
    tensors.rename("encoder.fc.", "fc.")  # Muse
    tensors.rename("encoder.output_norm_enc.", "hidden_norm.")
    if not is_ours:
        for published, ours in RENAMED.items():
            tensors.rename(published, ours)


def _either(fields: Fields, inner: Fields, name: str) -> Any:
    """The field inside `dflash_config`, else at the top."""
    top = fields.get(name)
    return inner.get(name, top)


def _taps(fields: Fields, inner: Fields, depth: int, num_layers: int | None) -> tuple[int, ...]:
    given = inner.numbers("layer_ids") or fields.numbers("aux_hidden_state_layer_ids")
    if given is not None:
        return given
    layers = inner.numbers("target_layer_ids") or fields.numbers("target_layer_ids")
    if layers is not None:
        return tuple(layer + 1 for layer in layers)
    total = fields.values.get("num_target_layers") or num_layers
    if total is None:
        raise ModelError(f"{fields.folder}: config.json names no target_layer_ids")
    if depth == 1:
        return (total // 2 + 1,)
    return tuple(round(1 + i * (total - 4) / (depth - 1)) + 1 for i in range(depth))


def _check_taps(fields: Fields, tensors: Tensors, config: DFlashConfig) -> None:
    width = tensors.shape("fc.weight")[1]
    each = config.target_hidden_size or config.hidden_size
    if width != len(config.taps) * each:
        raise ModelError(
            f"{fields.folder}: fc.weight reads {width / each:g} hidden states of width {each}, but "
            f"config.json names {len(config.taps)}"
        )
    if min(config.taps) < 0:
        raise ModelError(
            f"{fields.folder}: config.json names tap {min(config.taps)}, there is none"
        )


def _attention(
    fields: Fields, inner: Fields, depth: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Windows and causality of the layers."""
    windows = read_windows(fields, depth)
    slides = "layer_types" in fields and any(windows)
    if inner.switch("use_swa") and not slides:
        window = inner.number("swa_window_size")
        return (window,) * depth, _all(fields, inner, depth, False)
    inner.ignore("swa_window_size")
    non_causal = fields.get("sliding_window_non_causal")
    causal = tuple(bool(window) and not non_causal for window in windows)
    override = _all(fields, inner, depth, None)
    return windows, override or causal


def _all(fields: Fields, inner: Fields, depth: int, default: bool | None) -> tuple[bool, ...]:
    chosen = inner.get("causal", fields.get("is_causal"))
    chosen = default if chosen is None else chosen
    return () if chosen is None else (bool(chosen),) * depth


def _samples_from_anchor(fields: Fields, inner: Fields, is_ours: bool) -> bool:
    chosen = _either(fields, inner, "sample_from_anchor")
    if chosen is not None or is_ours:
        return bool(chosen)
    names = fields.get("architectures") or [""]
    is_dspark = fields.values.get("speculators_model_type") == "dspark"
    return is_dspark or names[0] in _DSPARK


def _dspark(fields: Fields, inner: Fields, tensors: Tensors) -> dict[str, Any]:
    rank = int(_either(fields, inner, "markov_rank") or 0)
    kind = _either(fields, inner, "markov_head_type") or "vanilla"
    trusts = bool(_either(fields, inner, "enable_confidence_head"))
    trusts = trusts or bool(inner.get("confidence"))
    with_markov = bool(_either(fields, inner, "confidence_head_with_markov"))
    if kind not in ("vanilla", "gated", "rnn"):
        raise ModelError(f"{fields.folder}: markov_head_type {kind!r} is not supported")
    if not rank:  # some writers keep the untrained tensors
        tensors.drop("markov_embed.weight", "markov_head.weight")
    if not trusts:
        tensors.drop("confidence_head.weight", "confidence_head.bias")
    return {
        "markov_rank": rank,
        "markov_type": kind,
        "confidence": trusts,
        "confidence_with_markov": with_markov and rank > 0 and trusts,
    }


def _read_mask_embedding(fields: Fields, tensors: Tensors) -> int | None:
    """mask_embedding.pt: the embedding of the mask; returns the mask token it names, if any."""
    path = fields.folder / "mask_embedding.pt"
    if not path.is_file():
        return None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        value = found["embedding"] if isinstance(found, dict) else found
        token = found.get("mask_token_id") if isinstance(found, dict) else None
        tensors.replace("mask_embedding", value.flatten())
    except Exception as error:
        what = " ".join(str(error).split())[:120]
        raise ModelError(f"{path} is not a mask embedding ({what}); download it again") from error
    return None if token is None else int(token)
