"""Any causal language model of transformers, whose attention uses our paged KV store.

transformers can replace a model's attention by a registered function. Ours packs the ragged pass as
one row of T tokens, writes keys and values into our store and reads the visible ones of each
sequence; the model's own cache is never used. Architectures that ignore the setting are refused
before loading; all others run the self-check after loading.

Shape legend: T tokens of the pass, R rows with logits, V vocabulary, H hidden, A query heads,
K key/value heads, G = A / K, D head size (of keys, or of values where noted).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface

from outrider.contracts import IntArray, ModelSpec, StepBatch, StepOutput
from outrider.errors import ModelError
from outrider.model.architectures import check_architecture, max_positions, reach_length
from outrider.model.attention import Plan, Terms
from outrider.model.driver import one_token
from outrider.model.few_rows import use_few_rows
from outrider.model.selfcheck import self_check
from outrider.model.weights import Checkpoint, count_tokens, read_config, read_eos_ids

ATTENTION_NAME = "outrider_paged"
_ACTIVE: ContextVar[TransformersModel] = ContextVar("outrider_active_model")


@dataclass(slots=True)
class _Layer:
    """The store of one attention layer, sized by its first call."""

    keys: torch.Tensor  # [slots, K, D]
    values: torch.Tensor  # [slots, K, D]
    window: int | None


class TransformersModel:
    """`contracts.Model` for a transformers model. Not for concurrent use."""

    spec: ModelSpec

    def __init__(self, inner: Any, folder: Path) -> None:
        self.inner = inner
        self.device: torch.device = inner.device
        self.dtype: torch.dtype = inner.dtype
        # In the order of the forward pass; a module that attends several times has several stores.
        self._layers: dict[tuple[torch.nn.Module, int], _Layer] = {}
        self._called: Counter[torch.nn.Module] = Counter()
        self._plans: dict[int, Plan] = {}
        self._batch: StepBatch | None = None
        self._num_slots = self._block_size = 0
        self._probed = False
        self._attentions: list[torch.nn.Module] = []
        self.masked: set[int] = set()  # windows of the model's own masks
        self._selects_rows = "logits_to_keep" in inspect.signature(inner.forward).parameters
        self._probe()
        self._stack = self._find_stack()
        self.spec = self._describe(folder)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        max_length: int | None = None,
    ) -> TransformersModel:
        """Reads a folder and runs the self-check. `dtype` None: float32 on a CPU, else as stored.

        Raises `ModelError` for a damaged folder and for a model that cannot be exact.
        """
        folder, device = Path(folder), torch.device(device)
        config = check_architecture(folder, read_config(folder))
        reach_length(config.get_text_config(), max_length)
        Checkpoint(folder)  # raises a clear error if the files are not readable safetensors
        if dtype is None and device.type == "cpu":
            dtype = torch.float32
        inner = _from_pretrained(folder, config, dtype)
        inner = inner.to(device).eval()
        use_few_rows(inner)
        model = cls(inner, folder)
        self_check(model, plain=model.plain_logits)
        return model

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Replaces the KV store by an empty one of `num_blocks * block_size` slots."""
        self._num_slots, self._block_size = num_blocks * block_size, block_size
        for layer in self._layers.values():
            layer.keys, layer.values = (
                self._empty(*store.shape[1:]) for store in (layer.keys, layer.values)
            )

    def _empty(self, num_heads: int, head_dim: int) -> torch.Tensor:
        shape = (self._num_slots, num_heads, head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> StepOutput:
        rows = torch.from_numpy(batch.logit_rows_R).to(self.device, torch.int64)
        with self._capturing(batch.taps) as taps, self._stopping_after(batch.exit_layer):
            logits = self._run(batch, rows)
        depth = len(self._attentions) if batch.exit_layer is None else batch.exit_layer
        if len(self._called) != depth:
            raise ModelError(f"{self.spec.name} cannot exit after layer {depth}; use all layers")
        return StepOutput(logits_RV=logits.float(), taps=taps)

    def copy_slots(self, source: IntArray, target: IntArray) -> None:
        """Copies the K/V of physical slots; all sources are read before any target is written."""
        from_, to = (torch.from_numpy(a).to(self.device, torch.int64) for a in (source, target))
        for layer in self._layers.values():
            for store in (layer.keys, layer.values):
                store.index_copy_(0, to, store.index_select(0, from_))

    @torch.no_grad()
    def plain_logits(self, tokens: list[int]) -> torch.Tensor:
        """[n, V] float32 of one pass with the model's own eager attention, without our KV store."""
        ours = self.inner.config._attn_implementation
        self.inner.set_attn_implementation("eager")
        try:
            ids = torch.tensor([tokens], device=self.device)
            logits: torch.Tensor = self.inner(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            self.inner.set_attn_implementation(ours)
        return logits

    def _run(self, batch: StepBatch, rows_R: torch.Tensor) -> torch.Tensor:
        """[R, V]: one pass of the inner model; its attention uses the layout of this batch."""
        ids, positions = (
            torch.from_numpy(a).to(self.device, torch.int64)[None]
            for a in (batch.tokens_T, batch.positions_T)
        )
        self._batch, self._plans = batch, {}
        self._called.clear()
        options: dict[str, Any] = {"logits_to_keep": rows_R} if self._selects_rows else {}
        token = _ACTIVE.set(self)
        try:
            output = self.inner(input_ids=ids, position_ids=positions, use_cache=False, **options)
        finally:
            _ACTIVE.reset(token)
            self._batch = None
        logits: torch.Tensor = output.logits[0]
        return logits if self._selects_rows else logits[rows_R]

    def attend(
        self,
        module: torch.nn.Module,
        q_ATD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_A: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, A, D]: stores the new keys and values, then attends. Called by every layer."""
        num_q, num_kv = len(q_ATD), len(k_KTD)
        place = module, self._called[module]
        self._called[module] += 1
        layer = self._layers.get(place)
        if layer is None:
            layer = _Layer(
                keys=self._empty(num_kv, k_KTD.shape[-1]),
                values=self._empty(num_kv, v_KTD.shape[-1]),
                window=window,
            )
            if self._probed:
                raise ModelError("the model attends more often in some passes; use another")
            self._layers[place] = layer
        group = num_q // num_kv
        plan = self._plan(group, layer.keys[0].numel())
        for store, new_KTD in ((layer.keys, k_KTD), (layer.values, v_KTD)):
            if isinstance(plan.new_slots, slice):
                store[plan.new_slots] = new_KTD.transpose(0, 1)
            else:
                store.index_copy_(0, plan.new_slots, new_KTD.transpose(0, 1))
        return plan.attend_heads(
            q_ATD.transpose(0, 1),
            layer.keys,
            layer.values,
            Terms(
                scale=scale,
                window=window,
                softcap=softcap,
                sinks_GK=None if sinks_A is None else sinks_A.view(num_kv, group).t(),
            ),
        )

    def _plan(self, group_size: int, kv_width: int) -> Plan:
        assert self._batch is not None
        if group_size not in self._plans:
            windows = [x.window for x in self._layers.values() if x.window is not None]
            self._plans[group_size] = Plan(
                self._batch,
                block_size=self._block_size,
                group_size=group_size,
                kv_width=kv_width,
                device=self.device,
                dtype=self.dtype,
                # The probe does not know later layers yet: they may have any window.
                min_window=min(windows, default=None) if self._probed else 1,
            )
        return self._plans[group_size]

    def _probe(self) -> None:
        """A first pass, over one token, which finds the layers and the sizes of their stores.

        It also records the windows that the model's own masks would have.
        """
        self.allocate(1, 1)
        masks = AttentionMaskInterface._global_mapping
        masks[ATTENTION_NAME] = _record_mask
        try:
            with torch.no_grad():
                self._run(one_token(), torch.tensor([0], device=self.device))
        finally:
            del masks[ATTENTION_NAME]
        self._probed = True
        self._attentions = list(dict.fromkeys(module for module, _ in self._layers))
        expected = self.inner.config.get_text_config().num_hidden_layers
        found = len(self._attentions)
        if expected not in (found, len(self._layers)):  # some count a layer as often as it runs
            raise ModelError(
                f"{type(self.inner).__name__} sent {found} of its {expected} layers "
                "through the attention setting; it cannot be served with our KV store"
            )

    def _describe(self, folder: Path) -> ModelSpec:
        text = self.inner.config.get_text_config()
        limit, why = max_positions(
            text, [self._layers[module, 0].window for module in self._attentions], self.masked
        )
        stores = [s for layer in self._layers.values() for s in (layer.keys, layer.values)]
        return ModelSpec(
            name=folder.name,
            vocab_size=text.vocab_size,
            num_tokens=count_tokens(folder, text.vocab_size),
            num_layers=len(self._attentions),
            hidden_size=text.hidden_size,
            max_positions=limit,
            shortened=why,
            kv_bytes_per_token=sum(s.shape[1] * s.shape[2] * s.itemsize for s in stores),
            num_parameters=sum(p.numel() for p in self.inner.parameters()),
            eos_ids=read_eos_ids(folder, read_config(folder)),
        )

    def _find_stack(self) -> tuple[torch.nn.Module, str] | None:
        """The owner and the name of the list of layers; entry i contains the i-th attention."""
        attentions = self._attentions
        for owner in self.inner.modules():
            for name, child in owner.named_children():
                if isinstance(child, torch.nn.ModuleList) and len(child) == len(attentions):
                    pairs = zip(child, attentions, strict=True)
                    if all(any(m is a for m in layer.modules()) for layer, a in pairs):
                        return owner, name
        return None

    def _stack_of(self, purpose: str) -> tuple[torch.nn.Module, str]:
        if self._stack is None:
            raise ModelError(
                f"{self.spec.name} does not show its layers, so it cannot {purpose}; "
                "choose a proposer that does not need it"
            )
        return self._stack

    @contextmanager
    def _stopping_after(self, depth: int | None) -> Iterator[None]:
        """Inside the block, the model consists of its first `depth` layers, norm and head."""
        if depth is None:
            yield
            return
        owner, name = self._stack_of("stop after a layer")
        layers = getattr(owner, name)
        setattr(owner, name, layers[:depth])
        try:
            yield
        finally:
            setattr(owner, name, layers)

    @contextmanager
    def _capturing(self, wanted: tuple[int, ...]) -> Iterator[dict[int, torch.Tensor]]:
        """Inside the block, passes fill the dictionary: layer -> hidden state after it, [T, H]."""
        taps: dict[int, torch.Tensor] = {}
        if not wanted:
            yield taps
            return
        owner, name = self._stack_of("show hidden states")
        layers = getattr(owner, name)

        def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            taps[0] = hidden.reshape(-1, hidden.shape[-1])

        def after(depth: int) -> Any:
            def hook(_module: Any, _args: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                taps[depth] = hidden.reshape(-1, hidden.shape[-1])

            return hook

        hooks = [layers[k - 1].register_forward_hook(after(k)) for k in wanted if k > 0]
        if 0 in wanted:
            hooks.append(layers[0].register_forward_pre_hook(before, with_kwargs=True))
        try:
            yield taps
        finally:
            for hook in hooks:
                hook.remove()


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: [1, heads, T, D] in, [1, T, heads, D] out."""
    if position_bias is not None or attention_mask is not None:
        raise ModelError(f"{type(module).__name__} needs its own attention mask; use another model")
    attended = _ACTIVE.get().attend(
        module,
        query[0],
        key[0],
        value[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks_A=s_aux,
    )
    return attended[None], None


def _record_mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any
) -> None:
    """Instead of a mask: none is made, because our attention makes its own, a causal one.

    What is asked for must be that, at least in the first `local_size` positions: see
    `max_positions`, which ends the context there unless the attention layers ask for the same.
    """
    model = _ACTIVE.get()
    if local_size:
        model.masked.add(int(local_size))
    if not _is_causal(mask_function, local_size or 1 << 16):
        raise ModelError(
            f"{type(model.inner).__name__} asks for a mask that is not causal; use another model"
        )


def _is_causal(mask_function: Callable[..., Any], length: int) -> bool:
    """Whether the tokens among the first `length` see themselves and all before them; sampled."""
    near = {0, 1, 2, 3, 7, 8, 15, 31, 63, 64, 255, 1000, 5000, 40000, length - 2, length - 1}
    at = torch.tensor(sorted(i for i in near if 0 <= i < length))
    query, key = at[:, None], at[None]
    try:
        seen = torch.as_tensor(mask_function(0, 0, query, key))
    except IndexError:  # it looks up a mask of this one token
        return True
    return bool((seen.expand(len(at), len(at)) == (key <= query)).all())


transformers.AttentionInterface.register(ATTENTION_NAME, _paged_attention)


def _from_pretrained(folder: Path, config: Any, dtype: torch.dtype | None) -> Any:
    """The model with all of its weights, or `ModelError`."""
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype or "auto",
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises all kinds
        line = " ".join(str(error).split())[:200]
        raise ModelError(
            f"transformers cannot load {folder} ({type(error).__name__}: {line}); "
            "check that weights and config.json belong together"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} tensors that its config.json implies, {missing[0]} "
            "first; the two do not belong together or the download is incomplete"
        )
    return model
