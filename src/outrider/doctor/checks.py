"""Does the pair fit together, and does it run as fast as it could?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from outrider import native
from outrider.contracts import Model
from outrider.doctor.advice import Advice, buckets
from outrider.doctor.curves import Curves
from outrider.doctor.heads import describe_head
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
from outrider.model import load_model
from outrider.model.bundled import find_folder
from outrider.model.capabilities import PrefersThinPasses
from outrider.model.families import DecoderConfig
from outrider.model.head_kinds import head_kind
from outrider.model.tokenizer import check_same_vocabulary, load_tokenizer
from outrider.registry import uses_draft_model

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    state: State
    text: str


def examine(engine: Engine, draft_model: str | None, *, device: str, dtype: str) -> list[Finding]:
    """What can be said without decoding. A drafter that cannot be loaded is a problem."""
    target = engine.target
    found = [*_machine(target, device), *_vocabulary(target, "target")]
    found.append(
        Finding(
            "KV cache",
            "ok",
            f"paged, {engine.kv.num_blocks * engine.kv.block_size} tokens, "
            f"{target.spec.kv_bytes_per_token / 1024:.1f} KiB each",
        )
    )
    if target.spec.shortened:
        text = f"{target.spec.max_positions} tokens: {target.spec.shortened}"
        found.append(Finding("context", "note", text))
    found += _experts(target)
    if draft_model is not None:
        found += _drafter(engine, draft_model, device, dtype)
    return found


def examine_passes(engine: Engine, advice: Sequence[Advice] = ()) -> list[Finding]:
    """After decoding: what the target had to prepare for it, and what is worth it."""
    target = engine.target
    if not isinstance(target, PrefersThinPasses):
        return []
    worth = ",".join(f"{size}x{k}" for size, k in buckets(advice, target))
    hint = f"; worth preparing: --buckets {worth}" if worth else ""
    return [Finding("passes", "ok", target.prepared() + hint)]


def examine_costs(curves: Curves, proposer: str) -> list[Finding]:
    """What a draft of the engine's own proposer costs, measured; look-ups cost next to nothing."""
    if not uses_draft_model(proposer):
        return []
    share = curves.draft_s(proposer, 1, 4) / curves.plain_s(1)
    text = f"4 tokens of {proposer} take {share:.0%} of a step without drafts"
    return [Finding("drafting", "note" if share > 1 else "ok", text)]


def _experts(target: Model) -> list[Finding]:
    """Beforehand, for an even router: tokens of one text touch fewer experts than that."""
    config = getattr(target, "config", None)
    if not isinstance(config, DecoderConfig) or config.experts is None:
        return []
    experts = config.experts
    one = 3 * config.hidden_size * experts.inner * sum(experts.layers)
    looked_up = config.vocab_size * config.hidden_size * (not config.tied)
    rest = target.spec.num_parameters - one * experts.count - looked_up

    def read(num_tokens: int) -> float:
        missed: float = (1 - experts.active / experts.count) ** num_tokens
        return rest + one * experts.count * (1 - missed)

    ratio = read(5) / read(1)
    text = (
        f"{experts.active} of {experts.count} for each token: a pass over 5 tokens reads up to "
        f"{ratio:.1f} times the weights of a pass over one, so "
    )
    text += (
        "short drafts pay best" if ratio > 1.5 else "drafts cost little more than on a dense model"
    )
    return [Finding("experts", "note" if ratio > 1.5 else "ok", text)]


def _machine(target: Model, device: str) -> list[Finding]:
    kind = type(target).__name__
    cores = os.cpu_count() or 1
    found = []
    if kind == "NativeDecoder":
        found.append(Finding("kernels", "ok", f"native ({native.isa()})"))
        threads = native.num_threads()
    else:
        why = "" if native.available() else f": {native.why_unavailable()}"
        slow = device == "cpu" and kind == "TorchDecoder"
        note = f"{kind}{why}" + ("; the native kernels are faster on a CPU" if slow else "")
        found.append(Finding("kernels", "note" if slow else "ok", note))
        threads = torch.get_num_threads()
    if device == "cpu":
        state: State = "ok" if threads == cores else "note"
        hint = "" if threads == cores else ": --threads says how many to use"
        found.append(Finding("threads", state, f"{threads} of {cores} cores{hint}"))
    dtype = str(getattr(target, "dtype", "")).removeprefix("torch.")
    found.append(Finding("dtype", "ok", dtype or "the model's own"))
    return found


def _vocabulary(model: Model, who: str) -> list[Finding]:
    spec = model.spec
    padding = spec.vocab_size - spec.num_tokens
    text = f"{spec.num_tokens} tokens" + (f" and {padding} rows of padding" if padding else "")
    return [Finding(f"{who} vocabulary", "ok", text + (", which are never drawn" * bool(padding)))]


def _drafter(engine: Engine, name: str, device: str, dtype: str) -> list[Finding]:
    target = engine.target.spec
    try:
        kind = head_kind(find_folder(name))
        if kind is not None:
            text, is_anothers = describe_head(name, kind, target)
            return [Finding("drafter", "note" if is_anothers else "ok", text)]
        check_same_vocabulary(engine.tokenizer, load_tokenizer(name))
        model = load_model(name, device=device, dtype=dtype, backend="auto")
    except OutriderError as error:
        return [Finding("drafter", "problem", str(error))]
    spec = model.spec
    found = [Finding("tokenizers", "ok", "every id means the same to both")]
    found += _vocabulary(model, "drafter")
    short = spec.max_positions < target.max_positions
    text = f"target {target.max_positions}, drafter {spec.max_positions}"
    if short:
        text += ": nothing is drafted after the drafter's last position"
    found.append(Finding("positions", "note" if short else "ok", text))
    share = spec.num_parameters / target.num_parameters
    size = f"{spec.num_parameters / 1e6:.1f}M of {target.num_parameters / 1e6:.1f}M parameters"
    found.append(Finding("drafter size", "note" if share > 0.3 else "ok", f"{size} ({share:.0%})"))
    return found
