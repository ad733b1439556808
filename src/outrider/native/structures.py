"""Structures of outrider.h: blocks in files, how a decoder deviates from Llama, stops, cycles."""

from __future__ import annotations

from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_void_p


class Stored(Structure):
    """Where blocks lie in an open file."""

    _fields_ = [("offset", c_int64), ("descriptor", c_int32)]


class Parts(Structure):
    """How a decoder deviates from Llama; all zeros: not at all."""

    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                "layer_norm",
                "no_input_norms",
                "out_norms",
                "parallel",
                "one_norm",
                "qk_layer_norm",
                "qk_span",
                "qk_late",
                "activation",
                "plain_mlp",
                "position_rows",
                "position_offset",
                "qk_rotated",
                "growth_every",
                "growth_first",
                "growth_everywhere",
                "latent_q",
                "latent_kv",
                "latent_rope",
                "value_dim",
                "gates_attention",
                "either_norms",
            )
        ),
        *(
            (name, c_float)
            for name in (
                "score_cap",
                "embedding_scale",
                "residual_scale",
                "logit_scale",
                "logit_cap",
                "growth",
            )
        ),
    ]


class Experts(Structure):
    """The experts of a decoder; all zeros: none."""

    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                "count",
                "active",
                "inner",
                "router",
                "normalised",
                "groups",
                "open_groups",
                "group_best",
                "weighs_input",
                "shared_gate",
                "bias",
            )
        ),
        *((name, c_float) for name in ("least_sum", "scale", "jitter", "clamp", "alpha")),
        ("inner_of", c_void_p),
        ("sparse", c_void_p),
    ]


class Mixer(Structure):
    """The recurrent part of layers; all zeros: none."""

    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                "delta",
                "heads",
                "groups",
                "rows",
                "outputs",
                "width",
                "norm_groups",
                "norm_first",
                "sigmoid_gate",
            )
        ),
        *((name, c_float) for name in ("least_step", "most_step", "most_strength", "eps")),
        ("mixes", c_void_p),
    ]


class StopRules(Structure):
    _fields_ = [
        ("chances", c_void_p),
        ("floors", c_void_p),
        ("num_floors", c_int32),
        ("toll", c_float),
    ]


class Cycles(Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in (
                "drafter",
                "logits",
                "out",
                "seconds",
                "script",
                "lookups",
                "stop",
                "states",
                "taps",
                "features",
                "features_out",
            )
        ),
        ("stop_rules", StopRules),
        ("floor", c_double),
        ("limit_s", c_double),
        *(
            (name, c_int32)
            for name in (
                "num_seqs",
                "table_width",
                "draft_table_width",
                "width",
                "most_cycles",
                "threads",
                "script_length",
                "copies",
                "exit_layer",
                "children",
                "num_taps",
                "passes",
                "breadth",
                "cycles",
            )
        ),
    ]
