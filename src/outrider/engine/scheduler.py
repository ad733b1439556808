"""Which sequences run this step and how many of their tokens: continuous batching.

The scheduler has no special case for speculation or prefill. A sequence has pending tokens (its
whole prompt at first, one token while decoding); a step computes a chunk of them, and where the
chunk reaches the end, drafts may ride along. Sequences that run go first, in order of arrival;
when the KV pool is short the youngest one is preempted: its blocks are freed and it is computed
again later, with the same result, because noise does not depend on when a token is drawn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import monotonic

from outrider.config import EngineConfig
from outrider.engine.request import Sequence
from outrider.errors import EngineError
from outrider.executors.base import Line
from outrider.kv.cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_sequences: int = EngineConfig.max_sequences  # running at once
    max_step_tokens: int = EngineConfig.max_step_tokens  # tokens of one pass, drafts included


class Scheduler:
    def __init__(self, kv: KVCache, max_positions: int, config: SchedulerConfig) -> None:
        self._kv = kv
        self.max_positions = max_positions
        self.config = config
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def is_full(self) -> bool:
        """No request is admitted before a sequence ends."""
        return len(self.running) >= self.config.max_sequences

    def plan(self) -> tuple[list[Line[Sequence]], list[Sequence]]:
        """This step's lines, KV reserved for each, and the sequences preempted to make room."""
        preempted: list[Sequence] = []
        lines: list[Line[Sequence]] = []
        free_tokens = self.config.max_step_tokens
        # Decoding sequences first: a long prompt must not delay their next tokens.
        for sequence in sorted(self.running, key=lambda s: s.num_pending > 1):
            if not free_tokens:
                break
            if sequence in preempted:
                continue
            num_tokens = min(sequence.num_pending, free_tokens)
            while not self._kv.reserve(sequence.id, sequence.num_computed + num_tokens):
                victim = self._preempt_youngest(keep=lines)
                preempted.append(victim)
                if victim is sequence:
                    break
            else:
                lines.append(Line.of(sequence, num_tokens))
                free_tokens -= num_tokens
        while self.waiting and free_tokens and not preempted:
            line = self._admit(free_tokens)
            if line is None:
                break
            lines.append(line)
            free_tokens -= line.num_tokens
        self._limit_drafts(lines, free_tokens)
        return lines, preempted

    def _admit(self, free_tokens: int) -> Line[Sequence] | None:
        sequence = self.waiting[0]
        if self.is_full or self._awaits_sibling(sequence):
            return None
        if not sequence.scores_prompt:  # which needs the logits of every token: none may be skipped
            sequence.num_computed = self._kv.match(sequence.id, sequence.tokens, sequence.salt)
        num_tokens = min(sequence.num_pending, free_tokens)
        # Reserve the whole prompt before starting: a half-admitted prompt would only be preempted.
        if not self._kv.reserve(sequence.id, len(sequence.tokens)):
            self._kv.free(sequence.id)
            sequence.num_computed = 0
            if not self.running:
                raise self._too_small(sequence)
            return None
        self.running.append(self.waiting.popleft())
        if sequence.admitted_s is None:
            sequence.admitted_s = monotonic()
            sequence.num_cached_tokens = sequence.num_computed
        return Line.of(sequence, num_tokens)

    def _awaits_sibling(self, sequence: Sequence) -> bool:
        """The n samples of a request share its prompt: let the first compute it for the others."""
        return sequence.sample_index > 0 and any(
            s.request is sequence.request
            and s.sample_index == 0
            and s.num_computed < s.num_prompt_tokens - 1
            for s in self.running
        )

    def _preempt_youngest(self, keep: list[Line[Sequence]]) -> Sequence:
        """Frees the youngest sequence that has no line in this step yet."""
        if len(self.running) == 1:
            raise self._too_small(self.running[0])
        kept = [line.sequence for line in keep]
        sequence = next(s for s in reversed(self.running) if s not in kept)
        self.running.remove(sequence)
        self._kv.free(sequence.id)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
        return sequence

    def _too_small(self, sequence: Sequence) -> EngineError:
        return EngineError(f"KV cache too small for one sequence of {len(sequence.tokens)} tokens")

    def _limit_drafts(self, lines: list[Line[Sequence]], free_tokens: int) -> None:
        """Leaves room for the token every verdict emits: in the request, the context, the step."""
        ready = [line for line in lines if line.is_last_chunk]
        for i, line in enumerate(ready):
            s = line.sequence
            left = min(
                s.params.max_tokens - s.num_output_tokens, self.max_positions - len(s.tokens)
            )
            share = free_tokens // (len(ready) - i)
            too_early = s.num_computed < s.num_prompt_tokens and not s.drafts_early
            wanted = s.max_draft_tokens if s.proposer is not None and not too_early else 0
            line.draft_limit = max(0, min(wanted, left - 1, share))
            free_tokens -= line.draft_limit

    def remove(self, sequence: Sequence) -> None:
        """Finished or cancelled: forget it and free its blocks. Unknown sequences are fine."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._kv.free(sequence.id)
