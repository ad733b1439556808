"""Finds the drafting head of a proposer, and refuses one that does not fit the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from outrider.contracts import Model, ModelSpec, ProposerContext
from outrider.errors import ConfigError, ModelError
from outrider.model.borrowed import Borrowed, borrow
from outrider.model.bundled import bundled_path, find_folder
from outrider.model.head_base import head_kind
from outrider.model.heads import DFlashHead, Eagle3Head, MedusaHeads, RunsHeads, load_head
from outrider.proposers._feature_heads import NativeRows

AnyHead = TypeVar("AnyHead", MedusaHeads, Eagle3Head, DFlashHead)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[AnyHead]):
    """A head that fits its target, and the target's layers that it uses; on the target's device."""

    head: AnyHead
    borrowed: Borrowed
    num_tokens: int  # the target's true vocabulary, which drafts are from
    num_layers: int  # of the target

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
    cls: type[AnyHead], context: ProposerContext, chosen: str | None
) -> Loaded[AnyHead]:
    """The head named by the proposer's own option, the user's draft model, or the bundled one.

    Raises ConfigError where there is none and ModelError for one that does not fit.
    """
    name = chosen or _offered(cls, context)
    head = load_head(find_folder(name))
    if not isinstance(head, cls):
        raise ConfigError(f"{name} holds {head.kind} heads; proposer {cls.kind!r} cannot run them")
    check_fit(head, context.target.spec, name)
    device, dtype = _place(context.target)
    head.requires_grad_(False)
    return Loaded(
        head.to(device, dtype),
        borrow(find_folder(context.model), device, dtype),
        context.target.spec.num_tokens,
        context.target.spec.num_layers,
    )


def native_rows(
    loaded: Loaded[Any], context: ProposerContext, weights: str | None
) -> NativeRows | None:
    """The head with a paged cache, if the target can run it; None: the torch module runs."""
    target = context.target
    offered = target.head_weights(loaded.head.kind) if isinstance(target, RunsHeads) else ()
    chosen = loaded.weights(weights, *offered)
    if not isinstance(target, RunsHeads) or not offered:
        return None
    head = target.make_head(loaded.head, loaded.borrowed, chosen)
    return NativeRows(head, context.make_kv(head), loaded.head.taps)


def check_fit(head: MedusaHeads | Eagle3Head | DFlashHead, spec: ModelSpec, name: str) -> None:
    config = head.config
    if (config.hidden_size, config.vocab_size) != (spec.hidden_size, spec.vocab_size):
        raise ModelError(
            f"{name} was made for a target of width {config.hidden_size} with {config.vocab_size} "
            f"ids; {spec.name} has {spec.hidden_size} and {spec.vocab_size}"
        )
    if max(head.taps, default=0) > spec.num_layers:
        raise ModelError(
            f"{name} reads layer {max(head.taps)}; {spec.name} has only {spec.num_layers}"
        )


def _offered(cls: type[AnyHead], context: ProposerContext) -> str:
    """The user's draft model if it is such a head, else the bundled target's head."""
    if context.drafter is not None and head_kind(find_folder(context.drafter)) == cls.kind:
        return context.drafter
    if find_folder(context.model) == bundled_path():
        return f"bundled:{cls.kind}"
    raise ConfigError(
        f"proposer {cls.kind!r} needs heads trained for this target: pass --draft-model FOLDER "
        f"(draft_model= in Python); 'outrider train {cls.kind}' makes them"
    )


def _place(target: Model) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the taps; on a CPU float32, for every stored dtype."""
    device = getattr(target, "device", torch.device("cpu"))
    dtype = getattr(target, "dtype", torch.float32) if device.type != "cpu" else torch.float32
    return device, dtype
