"""Finds the drafting head of a proposer, and refuses one that does not fit the target."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.contracts import Model, ModelSpec, ProposerContext
from outrider.errors import ConfigError, ModelError
from outrider.model.borrowed import Borrowed, borrow
from outrider.model.bundled import bundled_names, bundled_path, find_folder
from outrider.model.head_kinds import head_kind
from outrider.model.heads import (
    DFlashHead,
    Eagle3Head,
    FastHead,
    Head,
    MedusaHeads,
    MlpHead,
    RunsHeads,
    load_head,
)
from outrider.model.heads_native import reads_fused
from outrider.proposers._feature_heads import NativeRows
from outrider.sampling import true_vocabulary

AnyHead = TypeVar("AnyHead", MedusaHeads, Eagle3Head, DFlashHead, MlpHead)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[AnyHead]):
    """A head that fits its target, and the target's layers that it uses; on the target's device."""

    head: AnyHead
    borrowed: Borrowed
    num_tokens: int  # the target's true vocabulary, which drafts are from
    num_layers: int  # of the target

    def embed(self, ids: list[int]) -> Tensor:
        """[len(ids), H]: by the head's own embedding, else by the target's."""
        own = getattr(self.head, "embed_tokens", None)
        if own is None:
            return self.borrowed.embed(ids)
        weight_VH: Tensor = own.weight
        return weight_VH[torch.tensor(ids, device=weight_VH.device)]

    def output(self, normed: Tensor) -> Tensor:
        """The output head's logits of normalised states, over the draft vocabulary; float32."""
        own = getattr(self.head, "lm_head", None)
        if own is None:
            return self.borrowed.logits(normed).float()
        return F.linear(normed, own.weight).float()

    def spread(self, logits_RW: Tensor, ids_W: Tensor | None) -> Tensor:
        """Logits over the target's true ids: impossible where the head has none.

        `ids_W`: the target id of each column; None: all ids in order.
        """
        if ids_W is None:
            return true_vocabulary(logits_RW, self.num_tokens)
        logits_RV = logits_RW.new_full((len(logits_RW), self.vocab_size), -math.inf)
        logits_RV.index_copy_(1, ids_W, logits_RW)
        return true_vocabulary(logits_RV, self.num_tokens)

    @property
    def recommended(self) -> int | None:
        """See `contracts.Recommends`."""
        return self.head.num_draft_tokens

    @property
    def is_plain(self) -> bool:
        """Whether logits are one product, as the fast heads compute them."""
        return getattr(self.head, "lm_head", None) is not None or self.borrowed.has_plain_head

    @property
    def vocab_size(self) -> int:
        return len(self.borrowed.embedding_VH)

    def weights(self, chosen: str | None, *others: str) -> str:
        """The dtype of the head's weights: the choice, or the first possible one. Possible are
        `others` and the torch module's own; ConfigError for another choice."""
        own = str(next(self.head.parameters()).dtype).removeprefix("torch.")
        known = list(dict.fromkeys([*others, own]))
        if chosen is not None and chosen not in known:
            raise ConfigError(
                f"weights of proposer {self.head.kind!r} cannot be {chosen!r} with this target and "
                f"these options: leave them out, or choose {' or '.join(known)}"
            )
        return chosen or known[0]


def load_fitting_head(
    cls: type[AnyHead], context: ProposerContext, chosen: str | None, kind: str | None = None
) -> Loaded[AnyHead]:
    """The head named by the proposer's own option, the user's draft model, or the bundled one.

    `kind`: which of the heads of class `cls` it must be; None: there is one.
    Raises ConfigError where there is none and ModelError for one that does not fit.
    """
    kind = kind or cls.kind
    name = chosen or _offered(kind, context)
    spec = context.target.spec
    head = load_head(find_folder(name), num_layers=spec.num_layers)
    if head.kind != kind:
        raise ConfigError(f"{name} holds {head.kind} heads; proposer {kind!r} cannot run them")
    check_fit(head, spec, name)
    device, dtype = _place(context.target)
    head.requires_grad_(False)
    return Loaded(
        cast("AnyHead", head.to(device, dtype)),
        borrow(find_folder(context.model), device, dtype),
        spec.num_tokens,
        spec.num_layers,
    )


def native_rows(
    loaded: Loaded[Any],
    context: ProposerContext,
    weights: str | None,
    prepare: Callable[[Tensor], Tensor] | None = None,
) -> NativeRows[FastHead] | None:
    """The head with a cache of its own where the target can run it; None: its torch module does.

    `prepare` makes what the fast head reads of the taps side by side; None: it reads them as is.
    """
    target = context.target
    offered: tuple[str, ...] = ()
    if isinstance(target, RunsHeads) and loaded.is_plain:
        offered = target.head_weights(loaded.head)
    chosen = loaded.weights(weights, *offered)
    if not isinstance(target, RunsHeads) or not offered:
        return None
    head = target.make_head(loaded.head, loaded.borrowed, chosen)
    return NativeRows(head, context.make_kv(head), loaded.head.taps, prepare)


def last_states(borrowed: Borrowed, taps_nF: Tensor) -> Tensor:
    """What heads read that continue the target's last state: after its norm."""
    return borrowed.normed(taps_nF.to(borrowed.norm_H.dtype))


def reader(loaded: Loaded[Eagle3Head]) -> Callable[[Tensor], Tensor] | None:
    """What happens to the taps before a native EAGLE head reads them; None: nothing."""
    head = loaded.head
    if head.config.reads_last_state:
        return partial(last_states, loaded.borrowed)
    if not reads_fused(head):
        return None

    @torch.no_grad()
    def fuse(taps_nF: Tensor) -> Tensor:
        return head.fuse(taps_nF.view(1, len(taps_nF), len(head.taps), -1))[0]

    return fuse


def check_fit(head: Head, spec: ModelSpec, name: str) -> None:
    vocab_size = head.vocab_size or spec.vocab_size
    if (head.target_size, vocab_size) != (spec.hidden_size, spec.vocab_size):
        raise ModelError(
            f"{name} was made for a target of width {head.target_size} with {vocab_size} "
            f"ids; {spec.name} has {spec.hidden_size} and {spec.vocab_size}"
        )
    if max(head.taps, default=0) > spec.num_layers:
        raise ModelError(
            f"{name} reads layer {max(head.taps)}; {spec.name} has only {spec.num_layers}"
        )
    if min(head.taps, default=0) < 0:
        raise ModelError(
            f"{name} reads layer {min(head.taps)}: {spec.name}, with {spec.num_layers} layers, is "
            "not the target that it was made for"
        )


def _offered(kind: str, context: ProposerContext) -> str:
    """What the user chose as draft model if it is such a head, else the bundled target's own."""
    if context.drafter is not None and head_kind(find_folder(context.drafter)) == kind:
        return context.drafter
    is_ours = kind in bundled_names()
    if find_folder(context.model) == bundled_path() and is_ours:
        return f"bundled:{kind}"
    raise ConfigError(
        f"proposer {kind!r} needs heads trained for this target: pass --draft-model FOLDER "
        "(draft_model= in Python)" + (f"; 'outrider train {kind}' makes them" if is_ours else "")
    )


def _place(target: Model) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the taps; on a CPU float32, for every stored dtype."""
    device = getattr(target, "device", torch.device("cpu"))
    dtype = getattr(target, "dtype", torch.float32) if device.type != "cpu" else torch.float32
    return device, dtype
