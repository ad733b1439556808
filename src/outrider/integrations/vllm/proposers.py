"""Our look-ups as vLLM's custom proposer class; vLLM's rejection sampling stays as it is.

    --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
                           "model": "outrider.integrations.vllm.proposers.Suffix"}'
    --additional-config  '{"outrider": {"options": {"floor": 0.2}}}'      (optional)

A proposer gets the rows of vLLM's batch: tokens without a request id. Rows move when others end, so
a sequence is recognised by its length before the step and by its last tokens. A mistake there costs
drafts, never correctness.

Every worker of a tensor-parallel group drafts by itself and vLLM keeps one worker's drafts;
nothing here depends on time or chance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy.typing as npt

from outrider.contracts import Draw, Edits, Observation, Proposal, Proposer, SequenceView, StopRule
from outrider.integrations.vllm.mailbox import Mailbox
from outrider.proposers.hybrid import HybridProposer
from outrider.proposers.ngram import NgramConfig, NgramProposer
from outrider.proposers.options import read_options
from outrider.proposers.prediction import PredictionConfig, PredictionProposer
from outrider.proposers.suffix import SuffixConfig, SuffixProposer
from outrider.sampling import SamplingParams

KEY = "outrider"  # of vLLM's additional config, which holds our options
TAIL = 64  # tokens that must agree for two texts of one length to be taken for the same

_NO_PARAMS = SamplingParams()  # look-ups do not depend on sampling


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence of vLLM's as a `contracts.SequenceView`."""

    id: int
    tokens: list[int]
    num_prompt_tokens: int
    finish_ids: frozenset[int]
    prediction: list[int]
    num_computed: int = 0
    params: SamplingParams = field(default=_NO_PARAMS)
    seed: int = 0
    sample_index: int = 0
    draw: Draw = Draw.DETERMINISTIC
    salt: str = ""
    edits: Edits | None = None
    stop_rule: StopRule | None = None


class LookUp(ABC):
    """vLLM's interface of a custom proposer, with one of our proposers."""

    kind: ClassVar[str]

    def __init__(self, vllm_config: Any) -> None:
        """Raises ConfigError for options the proposer does not have."""
        given: Mapping[str, Any] = (vllm_config.additional_config or {}).get(KEY, {})
        model = vllm_config.model_config
        self._num_draft_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_length: int = model.max_model_len
        self._finish_ids = finish_ids(model.hf_config)
        self.proposer = self.build(given.get("options", {}))
        folder = given.get("predictions")
        self._mailbox = Mailbox(Path(folder)) if folder else None
        self.rows: dict[int, Sequence] = {}  # of the last call
        self._num_seen = 0

    @classmethod
    @abstractmethod
    def build(cls, options: Mapping[str, Any]) -> Proposer: ...

    def load_model(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027
        """vLLM loads every drafter's model; ours has none."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[Any],
        token_ids_cpu: npt.NDArray[Any],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """A draft for each row. Rows without a sampled token are still in their prompt."""
        old = self.rows
        waiting = {id(sequence): sequence for sequence in old.values()}
        self.rows = {}
        for row, sampled in enumerate(sampled_token_ids):
            if sampled:
                text = token_ids_cpu[row, : num_tokens_no_spec[row]]
                self.rows[row] = self._recognise(text, len(sampled), old.get(row), waiting)
        for sequence in waiting.values():
            self.proposer.release(sequence.id)
        return self._draft(len(sampled_token_ids))

    def _recognise(
        self,
        text: npt.NDArray[Any],
        num_new: int,
        likely: Sequence | None,
        waiting: dict[int, Sequence],
    ) -> Sequence:
        """The sequence that this row continues, with its new tokens; a new one if none fits."""
        start = len(text) - num_new
        tail: list[int] = text[max(0, start - TAIL) : start].tolist()
        candidates = waiting.values() if likely is None else (likely, *waiting.values())
        for sequence in candidates:
            if id(sequence) not in waiting or len(sequence.tokens) != start:
                continue
            if sequence.tokens[max(0, start - TAIL) :] == tail:
                del waiting[id(sequence)]
                sequence.tokens += text[start:].tolist()
                return sequence
        self._num_seen += 1
        prompt: list[int] = text[:start].tolist()
        guess = self._mailbox.get(prompt) if self._mailbox is not None else []
        tokens: list[int] = text.tolist()
        return Sequence(self._num_seen, tokens, start, self._finish_ids, guess)

    def _draft(self, num_rows: int) -> list[list[int]]:
        rows, views, budgets = [], [], []
        drafts: list[list[int]] = [[] for _ in range(num_rows)]
        everyone: Seq[SequenceView] = list(self.rows.values())
        self.proposer.observe(everyone, [Observation(Proposal(), None) for _ in everyone])
        for row, sequence in self.rows.items():
            budget = min(self._num_draft_tokens, self._max_length - len(sequence.tokens) - 1)
            if budget > 0:
                rows.append(row)
                views.append(sequence)
                budgets.append(budget)
        if views:
            for row, proposal in zip(rows, self.proposer.propose(views, budgets), strict=True):
                drafts[row] = proposal.tokens
        return drafts


class Ngram(LookUp):
    kind = NgramProposer.name

    @classmethod
    def build(cls, options: Mapping[str, Any]) -> Proposer:
        return NgramProposer(read_options(NgramConfig, cls.kind, options))


class Suffix(LookUp):
    """Chains, since vLLM verifies chains only.

    vLLM shows no tenants, so requests share outputs only if `shared_tokens` is set: the speed of an
    answer would reveal the requests of others.
    """

    kind = SuffixProposer.name

    @classmethod
    def build(cls, options: Mapping[str, Any]) -> Proposer:
        chosen = {"shared_tokens": 0, **options, "tree": False}
        return SuffixProposer(read_options(SuffixConfig, cls.kind, chosen))


class Prediction(LookUp):
    kind = PredictionProposer.name

    @classmethod
    def build(cls, options: Mapping[str, Any]) -> Proposer:
        return PredictionProposer(read_options(PredictionConfig, cls.kind, options))


class Hybrid(LookUp):
    """The caller's prediction or the text's own repetitions: whichever has been right more often.

    Options are the suffix proposer's.
    """

    kind = HybridProposer.name

    @classmethod
    def build(cls, options: Mapping[str, Any]) -> Proposer:
        return HybridProposer([Prediction.build({}), Suffix.build(options)], [])


def finish_ids(hf_config: Any) -> frozenset[int]:
    """The ids that end a text, as a model's config names them: one, several or none."""
    found = getattr(hf_config, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found) if isinstance(found, list | tuple) else frozenset({int(found)})


CLASSES = {cls.kind: f"{__name__}.{cls.__name__}" for cls in (Ngram, Suffix, Prediction, Hybrid)}
