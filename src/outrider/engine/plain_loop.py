"""Plain steps one behind the other, with any model: its pass and the draws, nothing in between."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from outrider.contracts import AheadBatch, AheadStep, Model, StepBatch
from outrider.noise import mix
from outrider.sampling import draw_tokens, true_vocabulary


class PlainLoop:
    """`contracts.RunsAhead` for models that are not; batches without drafts alone."""

    num_spare_slots = 0

    def __init__(self, model: Model) -> None:
        self._model = model

    def run_ahead(self, batch: AheadBatch, most_steps: int, limit_s: float) -> list[AheadStep]:
        num_sequences = len(batch.last_S)
        starts_S1 = np.arange(num_sequences + 1, dtype=np.int32)
        context_S = np.array(batch.context_S, np.int32)
        most_steps = min(most_steps, *batch.num_left_S)
        no_chains: list[list[int]] = [[] for _ in range(num_sequences)]
        tokens = batch.last_S
        steps: list[AheadStep] = []
        begun = ended = perf_counter()
        duration = 0.0
        while len(steps) < most_steps:
            is_late = ended + duration - begun > limit_s
            if steps and (is_late or (batch.stop is not None and batch.stop.value)):
                break
            pass_ = StepBatch(
                tokens_T=np.array(tokens, np.int32),
                positions_T=context_S,
                starts_S1=starts_S1,
                context_S=context_S,
                tables_SW=batch.tables_SW,
                logit_rows_R=starts_S1[:-1],
            )
            try:
                logits_SV = self._model.forward(pass_).logits_RV
            except Exception:
                if steps:  # whoever repeats this one alone meets it again, and knows what to do
                    break
                raise
            tokens = draw_tokens(
                true_vocabulary(logits_SV, self._model.spec.num_tokens),
                batch.rows,
                [mix(k + n + 1) for k, n in zip(batch.key_S, context_S.tolist(), strict=True)],
            )
            if min(tokens) < 0:  # not a number: likewise
                break
            started, ended = ended, perf_counter()
            duration = ended - started
            steps.append(AheadStep(no_chains, [[token] for token in tokens], 0.0, duration))
            if any(t in ids for t, ids in zip(tokens, batch.finish_ids, strict=True)):
                break
            context_S = context_S + 1
        return steps
