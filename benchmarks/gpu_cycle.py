"""Whole speculative cycles on the device without the engine: what the executor's parts can do.

A cycle of a batch is one graph launch. The host learns what a cycle emitted through a small
asynchronous copy and reads it while the next cycle runs. Coupled sample-match, temperature without
filters; without a draft model the same cycle is plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from outrider.contracts import StepBatch, Stream
from outrider.cuda.inputs import MAX_TOKENS, make_event
from outrider.cuda.ops import MAX_WIDTH
from outrider.executors.cuda_cycles import draft_part, verify_part
from outrider.model.cuda_decoder import CudaDecoder
from outrider.noise import as_signed, sequence_key

_CHUNK = 512  # of a prompt


class Cycle:
    """Owns both models' KV stores while it lives."""

    def __init__(
        self,
        target: CudaDecoder,
        draft: CudaDecoder | None,
        *,
        num_drafts: int,
        num_others: int = 0,
        num_sequences: int = 1,
        max_length: int = 2048,
        page: int = 16,
    ) -> None:
        """`num_others`: runners-up of every draft that are verified too; `max_length`: tokens of a
        sequence, prompt and output together."""
        self.num_drafts = num_drafts if draft is not None else 0
        self.num_others = num_others if draft is not None else 0
        self.num_sequences = num_sequences
        self.max_length = max_length
        self.target = target
        self.draft = draft
        width = 1 + self.num_drafts * (1 + self.num_others)
        assert width <= MAX_WIDTH
        assert num_sequences * width <= MAX_TOKENS
        # Two cycles may run ahead of what the host has seen.
        self._pages = -(-(max_length + 3 * width) // page)
        models = [target] if draft is None else [target, draft]
        table = np.arange(num_sequences * self._pages, dtype=np.int32).reshape(num_sequences, -1)
        for model in models:
            model.allocate(num_sequences * self._pages, page)
            tables = model.inputs.at(num_sequences, 1).tables_SW
            tables.fill_(-1)
            tables[:, : self._pages] = torch.from_numpy(table).to(model.device)
        self._table = table
        on = models[-1].inputs.device  # the state lies where drafting needs it
        self._line = models[-1].line[:num_sequences]
        self._committed = on["committed"][:num_sequences]
        self._secrets = on["secrets"][:num_sequences]
        shape = (num_sequences, self.num_drafts + 3)
        device = target.device
        pinned = device.type == "cuda"
        self._report = torch.zeros(shape, dtype=torch.int32, device=device)
        self._moves = torch.zeros(num_sequences, 2, dtype=torch.int32, device=device)
        self._seen = [
            (
                torch.zeros(shape, dtype=torch.int32, pin_memory=pinned),
                make_event() if pinned else None,
            )
            for _ in range(2)
        ]
        self._number = 0

    @torch.no_grad()
    def start(self, prompts: Seq[list[int]], *, temperature: float = 0.0, seed: int = 0) -> None:
        """Computes the prompts, of at least two tokens each, all but their last token."""
        assert len(prompts) == self.num_sequences
        for model in (self.target, self.draft):
            if model is None:
                continue
            for s, prompt in enumerate(prompts):
                assert 2 <= len(prompt) < self.max_length
                known = prompt[:-1]
                for at in range(0, len(known), _CHUNK):
                    model.forward(self._chunk(s, known[at : at + _CHUNK], at))
            tables = model.inputs.at(self.num_sequences, 1).tables_SW
            tables.fill_(-1)  # prompts of a few tokens used the same inputs
            tables[:, : self._pages] = torch.from_numpy(self._table).to(model.device)
            model.inputs.device["temperature"].fill_(temperature)
        last = torch.tensor([prompt[-2:] for prompt in prompts], dtype=torch.int32)
        self._line[:, :2] = last.to(self._line.device)
        self._committed.copy_(torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32))
        keys = [sequence_key(seed, s, Stream.TARGET) for s in range(self.num_sequences)]
        self._secrets.copy_(as_signed(keys, self._secrets.device))
        self._number = 0

    def _chunk(self, s: int, tokens: list[int], at: int) -> StepBatch:
        count = len(tokens)
        return StepBatch(
            tokens_T=np.array(tokens, np.int32),
            positions_T=np.arange(at, at + count, dtype=np.int32),
            starts_S1=np.array([0, count], np.int32),
            context_S=np.array([at], np.int32),
            tables_SW=self._table[s : s + 1],
            logit_rows_R=np.array([count - 1], np.int32),
        )

    @torch.no_grad()
    def launch(self) -> None:
        """One cycle, without waiting for it."""
        key = ("cycle", self.num_sequences, self.num_drafts, self.num_others, id(self))
        self.target.replay(key, self._run)
        host, event = self._seen[self._number % 2]
        host.copy_(self._report, non_blocking=True)
        if event is not None:
            event.record()
        self._number += 1

    def emitted(self, behind: int = 0) -> list[list[int]]:
        """What the last cycle emitted (or the one before it), by sequence; waits for it."""
        host, event = self._seen[(self._number - 1 - behind) % 2]
        if event is not None:
            event.synchronize()
        return [row[1 : 1 + row[0]] for row in host.tolist()]

    def generate(self, max_tokens: int) -> tuple[list[list[int]], int]:
        """At least `max_tokens` new tokens for each sequence, cut to that; and the cycles it took.

        Must follow `start`.
        """
        outputs: list[list[int]] = [[] for _ in range(self.num_sequences)]
        cycles = 0
        self.launch()
        while min(map(len, outputs)) < max_tokens:
            self.launch()
            for output, tokens in zip(outputs, self.emitted(behind=1), strict=True):
                output += tokens
            cycles += 1
        return [output[:max_tokens] for output in outputs], cycles

    def _run(self) -> None:
        if self.draft is not None and self.num_drafts:
            draft_part(self.draft, self.num_sequences, self.num_drafts, self.num_others)
        where = self.target.inputs.at(
            self.num_sequences, 1 + self.num_drafts * (1 + self.num_others), self.num_others
        )
        verify_part(self.target, self.draft, where, self._report, self._moves)
