"""transformers: generate() as it is, with an assistant model, and with prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from outrider.bench.contenders import Job, Run
from outrider.bench.measure import Tell
from outrider.bench.peers.base import jobs_by_workload, peer_rows, time_way
from outrider.bench.peers.unpacked import NUM_DRAFTS, Unpacked
from outrider.bench.report import Row
from outrider.bench.settings import Settings
from outrider.bench.workloads import Workload
from outrider.engine.engine import Engine

LOOKUP = 10


class FirstToken:
    """A streamer that only looks at the clock: the prompt comes first, then tokens."""

    def __init__(self) -> None:
        self.num_puts = 0
        self.started = 0.0
        self.num_before = 0  # tokens of the first put after the prompt

    def put(self, value: Any) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self.started = perf_counter()
            self.num_before = value.numel()

    def end(self) -> None:
        pass


class TransformersPeer:
    name = "transformers"

    def __init__(self, pair: Unpacked, dtype: str) -> None:
        self._pair, self._dtype = pair, getattr(torch, dtype)

    def rows(
        self, engine: Engine, workloads: Sequence[Workload], settings: Settings, tell: Tell
    ) -> list[Row]:
        from outrider.train.models import load_model

        model = load_model(self._pair.given, dtype=self._dtype).eval()
        ways: dict[str, dict[str, Any]] = {
            "plain": {},
            "prompt lookup": {"prompt_lookup_num_tokens": LOOKUP},
        }
        if self._pair.drafter is not None and self._pair.kind is None:  # it has no heads
            helper = load_model(self._pair.drafter, dtype=self._dtype).eval()
            helper.generation_config.num_assistant_tokens = NUM_DRAFTS
            helper.generation_config.num_assistant_tokens_schedule = "constant"
            ways["assisted"] = {"assistant_model": helper}
        work = jobs_by_workload(engine, workloads, settings)
        found = {}
        for name, options in ways.items():
            tell(f"{self.name}, {name}")
            found[name] = time_way(
                lambda job, options=options: self._decode(model, job, options),  # type: ignore[misc]
                work,
                settings,
            )
        return peer_rows(self.name, engine, work, found)

    def _decode(self, model: Any, job: Job, options: dict[str, Any]) -> Run:
        sampling: dict[str, Any] = {"do_sample": False}
        if job.params.temperature > 0:
            sampling = {"do_sample": True, "temperature": job.params.temperature}
        clock = FirstToken()
        torch.manual_seed(job.params.seed or 0)
        ids = torch.tensor([job.prompt])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=job.params.max_tokens,
                eos_token_id=list(job.ends) or None,
                pad_token_id=0,
                streamer=clock,
                top_k=0,
                **sampling,
                **options,
            )
        seconds = perf_counter() - clock.started
        tokens = output[0, len(job.prompt) :].tolist()
        return Run([tokens], seconds, len(tokens) - clock.num_before)
