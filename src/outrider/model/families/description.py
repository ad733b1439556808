"""`DecoderConfig`: what a decoder computes, in parts that the torch and the native path share.

The fields without a default describe a Llama. Every further field names one deviation from it, and
its default is what Llama does. A path that cannot run a deviation refuses it by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from outrider.model.families.mixers import Mixer
from outrider.model.families.residuals import LayerInputs, Streams
from outrider.model.rope import LONGROPE_ENDS, RopeConfig

ROUTERS = ("softmax", "softmax_of_chosen", "sigmoid", "sparsemixer", "sigmoid_of_chosen")
SPANS = ("head", "heads", "row")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
NO_ROPE = -1
# What mixes the tokens in a layer.
ATTENTION, STATE, BOTH, NOTHING = "attention", "state", "both", "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Queries, keys and values made of small latent vectors, which are normalised first.

    A head of `rope + nope` dimensions; the rotated part of a key is the same for all heads.
    """

    q_rank: int  # 0: queries are made of the residual itself
    kv_rank: int
    rope: int
    nope: int
    value: int  # dimensions of a value; the rest of its place in the cache is empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Queries at position p are multiplied by 1 + factor * log(1 + floor((p + first) / every))."""

    factor: float
    every: int
    first: int = 0
    everywhere: bool = True  # False: only in layers that do not rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """Where a layer has its experts; modules in the layer, E for the number of an expert."""

    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    gate: str = "mlp.experts.E.gate_proj"
    up: str = "mlp.experts.E.up_proj"
    down: str = "mlp.experts.E.down_proj"
    # One tensor for all experts' gates and ups, [E, 2 * inner, H], and one for their downs; biases
    # have the suffix "_bias". Transposed: [E, H, 2 * inner]; interleaved: gate 0, up 0, gate 1...
    all_gate_up: str | None = None
    all_down: str = ""
    transposed: bool = False
    interleaved: bool = False
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where a checkpoint has its tensors, if not where a Llama checkpoint has them.

    `modules` maps modules of a Llama layer, or whole tensors, to those of this checkpoint's layers.
    """

    trunks: tuple[str, ...] = ("model.",)  # before everything but the head; the first that fits
    heads: tuple[str, ...] = ("lm_head",)
    layers: str = "layers."
    embedding: str = "embed_tokens"
    embedding_norm: str = "embed_norm"
    positions: str = "embed_positions"
    final_norm: str = "norm"
    modules: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    # What some checkpoints call the modules of this one; those that stand in the layer before.
    others: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    in_layer_before: tuple[str, ...] = ()
    split_convolution: tuple[str, ...] = ()  # modules of queries, keys and values, if not one
    # One tensor for queries, keys and values. Its rows are groups of equally many heads; each group
    # holds the rows of its queries, keys and values in this order.
    fused_qkv: str | None = None
    fused_groups: int = 1
    fused_order: str = "qkv"
    fused_gate_up: str | None = None
    experts: ExpertLayout = ExpertLayout()
    scales: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))  # of tensors
    head_norms: str | None = None  # q and k norms, one module per head: with * for q or k
    transposed: bool = False  # matrices of layers are [inputs, outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A layer whose MLP is a sum of a few of many MLPs, chosen by a router for each token.

    softmax            weights are probabilities over all experts, the largest are chosen
    softmax_of_chosen  the largest scores are chosen, weights are probabilities among them
    sigmoid            weights are sigmoids of the scores, the largest are chosen
    sigmoid_of_chosen  the largest scores are chosen, weights are their sigmoids
    sparsemixer        two experts, each weighed among those whose score is near the largest left
    """

    count: int
    active: int  # experts of a token
    inner: int  # the intermediate size of each
    layers: tuple[bool, ...]  # whether a layer has experts; other layers have a plain MLP
    router: str = "softmax"
    router_bias: bool = False  # added to the scores
    choice_bias: bool = False  # added to the weights for the choice only
    normalised: bool = True  # the weights of a token's experts are divided by their sum,
    least_sum: float = 1e-20  # or by this, if it is more
    scale: float = 1.0  # of the weights
    groups: int = 1  # experts are chosen among the best `open_groups` of these groups,
    open_groups: int = 1
    group_best: int = 2  # whose score is the sum of their best so many experts
    jitter: float = 0.0  # of sparsemixer: what is near
    weighs_input: bool = False  # the weight multiplies what an expert reads, not what it gives
    bias: bool = False
    clamp: float = (
        0.0  # limits gate and up; then the gate is g * sigmoid(alpha g), the factor up + 1
    )
    alpha: float = 1.0
    shared: int = 0  # the intermediate size of an MLP beside the experts for all tokens; 0: none
    shared_gate: bool = False  # whose output is multiplied by the sigmoid of a product
    # Experts read the residual through a norm of their own, and their sum has a norm, as has the
    # output of the MLP beside them. The router reads the residual normalised and scaled.
    apart: bool = False
    own_scales: bool = False  # of each expert, learned: they multiply the weights

    def extra_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Tensors of a layer besides the router, its biases and the experts."""
        scales: dict[str, tuple[int, ...]]
        scales = {"router.per_expert_scale": (self.count,)} if self.own_scales else {}
        if not self.apart:
            return scales
        norms = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1")
        names = [f"{name}.weight" for name in (*norms, "post_feedforward_layernorm_2")]
        for name in (*names, "router.scale"):
            scales[name] = (hidden,)
        return scales


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder with every default of its family resolved."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer: how many positions a token sees, its own included
    dtype: str  # as stored: "float32", "float16", "bfloat16"

    layout: Layout = Layout()
    layer_norm: bool = False  # subtracts the mean and divides by the deviation; False: RMS
    norm_weight: bool = True
    norm_bias: bool = False
    norm_shift: float = 0.0  # added to the stored weights of norms
    norm_before: bool = True  # attention and MLP normalise what they read,
    norm_after: bool = False  # and what they add
    norms_out: tuple[bool, ...] = ()  # per layer, if it is one of the two: whether what they add
    # Per layer, where the norms before attention and before the MLP replace the residual: what the
    # residual is multiplied by before more is added. 0: there is no norm.
    norm_stays: tuple[tuple[float, float], ...] = ()
    parallel: bool = False  # the MLP reads what the attention reads, not what it wrote,
    one_norm: bool = False  # through the same norm
    last_o_bias: bool = False  # the last layer has `o_bias`, the others have none
    qk_layer_norm: bool = False
    qk_span: str = "head"  # a norm's weights: the same for each head, other for each, for the row
    qk_norm_late: bool = False  # after the rotation
    qk_unit: bool = False  # norms without weights, in layers that rotate only
    rotary_dim: int | None = None  # the leading dimensions of a head that rotate; None: all
    rope_pairs: bool = False  # neighbours rotate together, not the halves of the head
    other_ropes: tuple[RopeConfig, ...] = ()
    layer_ropes: tuple[int, ...] = ()  # per layer: 0 `rope`, i `other_ropes[i - 1]`, NO_ROPE
    chunks: tuple[int | None, ...] = ()  # per layer: a token sees its chunk of so many positions
    attention_scale: float | None = None  # None: head_dim ** -0.5
    growth: Growth | None = None  # of queries, with their position
    slopes: tuple[float, ...] = ()  # per head: what a score loses with each position of distance
    score_cap: float | None = None
    attention_gate: bool = False  # attention is multiplied by the sigmoid of a product
    sinks: bool = False  # a learned score per head that takes part in the softmax only
    activation: str = "silu"
    gated: bool = True  # the MLP multiplies the activation by a second product
    position_rows: int = 0  # learned positions: rows of their table,
    position_offset: int = 0  # and the row of position 0
    sinusoids: bool = False  # the table is computed, not stored
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    logit_cap: float | None = None
    head_bias: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    mixer: Mixer | None = None  # the recurrent part of layers that have one
    mixing: tuple[str, ...] = ()  # per layer ATTENTION, STATE, BOTH or NOTHING
    mlps: tuple[bool, ...] = ()  # whether a layer has an MLP; (): all have
    # Per layer, where layers differ; (): all have the sizes above.
    head_dims: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()
    inner_sizes: tuple[int, ...] = ()
    kv_layers: tuple[int, ...] = ()  # per layer: the layer whose keys and values it reads
    values_of_keys: tuple[bool, ...] = ()  # whether the product of the keys gives the values, too
    value_unit: bool = False  # values are normalised, without weights
    layer_scale: bool = False  # a stored number multiplies what a layer leaves
    layer_inputs: LayerInputs | None = None
    streams: Streams | None = None
    limited: str = ""  # why `max_positions` is less than the config says
    sparsity: tuple[float, ...] = ()  # per layer: the share of the MLP's gates that is cut to 0

    def of_layer(self, layer: int) -> DecoderConfig:
        """With the heads of this layer."""
        if not self.head_dims:
            return self
        kv_heads = self.kv_heads[layer] if self.kv_heads else self.num_kv_heads
        return replace(
            self, head_dim=self.head_dims[layer], num_kv_heads=kv_heads, head_dims=(), kv_heads=()
        )

    def kv_layer(self, layer: int) -> int:
        """The layer that computes the keys and values of `layer`."""
        return self.kv_layers[layer] if self.kv_layers else layer

    def has_kv(self, layer: int) -> bool:
        """Whether it computes and stores keys and values."""
        return self.has_attention(layer) and self.kv_layer(layer) == layer

    def has_o_bias(self, layer: int) -> bool:
        return self.o_bias or (self.last_o_bias and layer == self.num_layers - 1)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def has_attention(self, layer: int) -> bool:
        return not self.mixing or self.mixing[layer] in (ATTENTION, BOTH)

    def has_state(self, layer: int) -> bool:
        return bool(self.mixing) and self.mixing[layer] in (STATE, BOTH)

    def mixes(self, layer: int) -> bool:
        return self.has_attention(layer) or self.has_state(layer)

    def has_mlp(self, layer: int) -> bool:
        """Whether the layer has an MLP or experts."""
        return not self.mlps or self.mlps[layer]

    @property
    def num_attentions(self) -> int:
        """Layers with K/V of their own."""
        return sum(map(self.has_kv, range(self.num_layers)))

    @property
    def kv_width(self) -> int:
        """Numbers of a token in the K/V of all layers."""
        sizes = [self.of_layer(i) for i in range(self.num_layers) if self.has_kv(i)]
        return sum(2 * size.num_kv_heads * size.head_dim for size in sizes)

    @property
    def num_states(self) -> int:
        """Layers with a recurrent state."""
        return sum(self.has_state(i) for i in range(self.num_layers))

    def inner_size(self, layer: int) -> int:
        """The intermediate size of a layer's MLP, or of the one beside its experts; 0: none."""
        if not self.has_mlp(layer):
            return 0
        if self.experts is None or not self.experts.layers[layer]:
            return self.inner_sizes[layer] if self.inner_sizes else self.intermediate_size
        return self.experts.shared

    @property
    def group_size(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def deviations(self) -> tuple[str, ...]:
        """The parts in which it differs from a Llama; where its tensors are is none of them."""
        named = (f for f in fields(self) if f.default is not MISSING and f.name != "layout")
        return tuple(f.name for f in named if getattr(self, f.name) != f.default)

    @property
    def is_llama(self) -> bool:
        """Whether it computes what a Llama computes, from tensors of the same names."""
        return not self.deviations and self.layout == Layout()

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return (self.rope, *self.other_ropes)

    def rope_of(self, layer: int) -> int:
        """The index in `ropes`, or NO_ROPE."""
        return self.layer_ropes[layer] if self.layer_ropes else 0

    def chunk_of(self, layer: int) -> int | None:
        return self.chunks[layer] if self.chunks else None

    def norms_heads(self, layer: int) -> bool:
        """Whether the queries and keys of a layer are normalised."""
        return self.qk_norm and not (self.qk_unit and self.rope_of(layer) == NO_ROPE)

    @property
    def shortened(self) -> str:
        """Why `max_positions` is less than the config says; "" if it cannot be."""
        if any(rope.ends_early for rope in self.ropes):
            return LONGROPE_ENDS
        return self.limited

    def rope_dims(self, index: int) -> int:
        """How many dimensions of a head a rope of `ropes` turns."""
        layers = range(self.num_layers if self.head_dims else 0)
        found = (self.of_layer(i).rotated for i in layers if self.rope_of(i) == index)
        return next(found, self.rotated)

    @property
    def rotated(self) -> int:
        """The number of leading dimensions of a head that rotate."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale


def one_layer(config: DecoderConfig, *, sparse: bool) -> DecoderConfig:
    """A decoder of one layer, like the last that attends; `sparse`: with experts."""
    last = config.num_layers - 1
    if config.mixing:
        last = max((i for i, kind in enumerate(config.mixing) if kind == ATTENTION), default=last)
    here = slice(last, last + 1)
    experts = config.experts if sparse else None
    return replace(
        config.of_layer(last),
        num_layers=1,
        windows=config.windows[here],
        norms_out=config.norms_out[here],
        norm_stays=config.norm_stays[here],
        layer_ropes=config.layer_ropes[here],
        chunks=config.chunks[here],
        mixer=None,
        mixing=(),
        mlps=config.mlps[here],
        inner_sizes=config.inner_sizes[here],
        kv_layers=(),
        values_of_keys=config.values_of_keys[here],
        layer_inputs=None,
        streams=None,
        sparsity=config.sparsity[here],
        experts=None if experts is None else replace(experts, layers=(True,)),
    )


def unlike(config: DecoderConfig, runs: frozenset[str]) -> str:
    """The first deviation that a path which runs those of `runs` cannot run; "" for none."""
    return next((name for name in config.deviations if name not in runs), "")


def show(value: Any) -> str:
    return repr(value)[:80]
