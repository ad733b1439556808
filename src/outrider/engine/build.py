"""From names and numbers to a running engine. Every impossible combination is refused here."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from outrider import native
from outrider.config import EngineConfig as EngineConfig
from outrider.contracts import Model, ModelSpec, OwnsKV, Proposer, ProposerContext
from outrider.engine.calibrate import USUAL_DRAFTS, Calibration
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.engine.scheduler import Scheduler, SchedulerConfig
from outrider.errors import ConfigError
from outrider.executors import executors_for
from outrider.kv.cache import KVCache
from outrider.model import load_model
from outrider.model.bundled import find_folder
from outrider.model.capabilities import KeepsStates, PrefersThinPasses
from outrider.model.gguf.files import model_name
from outrider.model.head_kinds import head_kind
from outrider.model.named import default_drafter
from outrider.model.tokenizer import Tokenizer, check_drafter_vocabulary, load_tokenizer
from outrider.policy.controller import AdaptivePolicy
from outrider.registry import (
    WITH_MODEL,
    WITH_MTP,
    WITHOUT_MODEL,
    build_proposer,
    check_names,
    proposer_names,
)
from outrider.verifiers import VERIFIERS, exact_pairing, make_verifier

DEFAULT_KV_BYTES = 2 << 30


class Drafter(NamedTuple):
    """A draft model or a head beside the first one, and the proposer that drafts with it."""

    proposer: str
    folder: str


class ProposerSet(MutableMapping[str, Proposer]):
    """Proposers by name, each built when a request first asks for it."""

    def __init__(
        self,
        make_context: Callable[..., ProposerContext],
        options: Mapping[str, Mapping[str, object]],
        drafters: Mapping[str, Drafter] = {},
    ) -> None:
        """`drafters` are the further ones, by the names that requests use."""
        check_names(set(options) - set(drafters))
        self.drafters = drafters
        self._make_context = make_context
        self._options = options
        self._built: dict[str, Proposer] = {}

    def __getitem__(self, name: str) -> Proposer:
        if name not in self._built:
            options = self._options.get(name, {})
            context = self._make_context(proposer=self.__getitem__, options=options)
            if name not in self.drafters:
                self._built[name] = build_proposer(name, context)
            else:
                other = self.drafters[name]
                context = replace(context, drafter=other.folder, drafter_proposer=other.proposer)
                self._built[name] = build_proposer(other.proposer, context)
                self._built[name].name = name
        return self._built[name]

    def __setitem__(self, name: str, proposer: Proposer) -> None:
        self._built[name] = proposer

    def __delitem__(self, name: str) -> None:
        del self._built[name]

    def built(self) -> list[str]:
        return list(self._built)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*proposer_names(), *self.drafters, *self._built]))

    def __len__(self) -> int:
        return len([*self])


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Loading makes many objects that stay: a search for garbage among them takes 0.1 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # moves all objects to the oldest generation, unsearched
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@_without_garbage_collection()
def build(config: EngineConfig) -> Engine:
    """Loads the models and puts the engine together; raises ConfigError or ModelError."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
        native.set_threads(config.threads)
    target = load_model(
        config.model,
        device=config.device,
        dtype=config.dtype,
        backend=config.backend,
        tensor_parallel_size=config.tensor_parallel_size,
        kv_dtype=config.kv_dtype,
        max_length=config.max_model_len,
    )
    return assemble(config, target, load_tokenizer(config.model))


def assemble(config: EngineConfig, target: Model, tokenizer: Tokenizer) -> Engine:
    """An engine around a target that is already loaded."""
    spec = target.spec
    _check(config, target)
    draft_model = config.draft_model or default_drafter(config.model)
    name = config.proposer or _drafter_proposer(config.model, draft_model) or WITHOUT_MODEL
    make_kv = _kv_maker(config, spec)
    kv = make_kv(target)
    proposers = _make_proposers(config, target, kv, make_kv, tokenizer, draft_model)
    for other in proposers.drafters:
        proposers[other]  # built now, or refused
    verifiers = {known: make_verifier(known) for known in VERIFIERS}
    if config.verifier not in verifiers:
        make_verifier(config.verifier)  # raises with a suggestion
    if config.num_draft_tokens != 0:
        proposer = proposers[name]
        exact_pairing(proposer.draws, proposer.trees, verifiers[config.verifier])
    else:
        check_names([name])
    limits = SchedulerConfig(
        max_sequences=config.max_sequences, max_step_tokens=config.max_step_tokens
    )
    max_length = min(spec.max_positions, kv.num_blocks * kv.block_size)
    if config.max_model_len is not None:
        if config.max_model_len > max_length:
            raise ConfigError(
                f"--max-model-len may be at most {max_length} here, not {config.max_model_len}"
            )
        max_length = config.max_model_len
    evenly = 0
    if isinstance(target, PrefersThinPasses):  # prepared steps are equally wide for all
        evenly = max([1, *(k for _, k in config.buckets or ((1, USUAL_DRAFTS),))])
    controller = AdaptivePolicy(evenly=evenly)
    default = Speculation(
        proposer=name if config.num_draft_tokens else None,
        num_draft_tokens=config.num_draft_tokens,
        verifier=config.verifier,
    )
    engine = Engine(
        target,
        kv,
        Scheduler(kv, max_length, limits),
        controller,
        proposers,
        verifiers,
        executors_for(target, kv, proposers, verifiers),
        tokenizer,
        default,
        config.max_ahead_steps,
    )
    engine.drafters = tuple(proposers.drafters)
    controller.measure = Calibration(engine, _identity(config, draft_model), config.buckets)
    if config.num_draft_tokens == "auto" or (config.buckets and config.num_draft_tokens):
        controller.prepare(name)
    return engine


def _check(config: EngineConfig, target: Model) -> None:
    if config.buckets is not None and not isinstance(target, PrefersThinPasses):
        raise ConfigError("buckets are what a GPU prepares: leave them out, or use device cuda")
    limit = target.spec.max_positions
    if config.num_draft_tokens != "auto" and config.num_draft_tokens >= limit:
        raise ConfigError(
            f"num_draft_tokens must be below the context of {limit} tokens, "
            f"not {config.num_draft_tokens}"
        )


def _kv_maker(config: EngineConfig, spec: ModelSpec) -> Callable[[OwnsKV], KVCache]:
    """Gives a model its KV store and its bookkeeping, as long as the target's."""
    wanted = config.kv_tokens
    if config.kv_memory is not None:
        wanted = config.kv_memory // spec.kv_bytes_per_token
        if wanted < config.block_size:
            least = config.block_size * spec.kv_bytes_per_token
            raise ConfigError(f"--kv-memory must be at least {least} bytes for this model")
    kv_tokens = wanted or max(
        spec.max_positions,
        min(config.max_sequences * spec.max_positions, DEFAULT_KV_BYTES // spec.kv_bytes_per_token),
    )

    def make_kv(owner: OwnsKV) -> KVCache:
        num_blocks = -(-kv_tokens // config.block_size)
        owner.allocate(num_blocks, config.block_size)
        has_state = owner.has_state if isinstance(owner, KeepsStates) else None
        return KVCache(num_blocks, config.block_size, config.prefix_caching, has_state)

    return make_kv


def _make_proposers(
    config: EngineConfig,
    target: Model,
    kv: KVCache,
    make_kv: Callable[[OwnsKV], KVCache],
    tokenizer: Tokenizer,
    draft_model: str | None,
) -> ProposerSet:
    def load(name: str, *, dtype: str | None = None) -> Model:
        # The backend is what can run the engine's own type; another type may need another one.
        backend = config.backend if dtype is None else "auto"
        return load_model(
            name,
            device=config.device,
            dtype=dtype or config.dtype,
            backend=backend,
            max_length=config.max_model_len,
        )

    def load_drafter(name: str, *, dtype: str | None = None) -> Model:
        kind = head_kind(find_folder(name))
        if kind is not None:
            raise ConfigError(f"{name} holds {kind} heads, no draft model: use proposer {kind!r}")
        check_drafter_vocabulary(tokenizer, name)
        return load(name, dtype=dtype)

    context = partial(
        ProposerContext,
        target=target,
        model=config.model,
        target_kv=kv,
        tokenizer=tokenizer,
        drafter=draft_model,
        drafter_proposer=_drafter_proposer(config.model, draft_model),
        load_drafter=load_drafter,
        load_model=load,
        make_kv=make_kv,
    )
    return ProposerSet(context, config.proposer_options, _other_drafters(config, draft_model))


def _other_drafters(config: EngineConfig, draft_model: str | None) -> dict[str, Drafter]:
    """By the proposer of each; to the name of a second one of a kind, the folder's is added."""
    first = _drafter_proposer(config.model, draft_model)
    found: dict[str, Drafter] = {}
    for folder in config.other_drafters:
        proposer = name = _drafter_proposer(config.model, folder) or WITH_MODEL
        if name == first or name in found:
            name = f"{proposer}:{model_name(find_folder(folder))}"
        if name in found:
            raise ConfigError(f"two drafters are called {name!r}: rename the folder of one")
        found[name] = Drafter(proposer, folder)
    return found


def _identity(config: EngineConfig, draft_model: str | None) -> dict[str, object]:
    """What measured costs depend on."""
    return {
        "model": config.model,
        "draft_model": [draft_model, *config.other_drafters]
        if config.other_drafters
        else draft_model,
        "options": repr(sorted(config.proposer_options.items())),
        "machine": [config.device, config.dtype, config.backend, config.tensor_parallel_size]
        + [config.kv_dtype] * (config.kv_dtype != "auto"),
    }


def _drafter_proposer(model: str, draft_model: str | None) -> str | None:
    """The proposer of the draft model or heads, or of the target's own layer for drafting."""
    if draft_model is not None:
        return head_kind(find_folder(draft_model)) or WITH_MODEL
    from outrider.model.mtp_layer import holds_mtp

    return WITH_MTP if holds_mtp(find_folder(model)) else None
