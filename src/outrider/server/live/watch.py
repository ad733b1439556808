"""The steps of one request for the live page: costs, drafts, verdicts and the reasons for K.

In the engine's thread, `Notebook` notes the costs of every step of a watched request and why it
drafted as much as it did; the rest is in the step's event. Other requests leave no notes.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider.engine.engine import Engine
from outrider.events import StepEvent, StepReport, StepTiming
from outrider.origins import Kind, Spelling, judged
from outrider.policy.base import Choice, Explains
from outrider.server.errors import api_error
from outrider.server.generation import Ask, Generation
from outrider.server.service import Service
from outrider.server.stream import DONE, Last, frame
from outrider.statistics import SpeculationStats


@dataclass(frozen=True, slots=True)
class Note:
    """What the engine knew when it ran a step."""

    timing: StepTiming
    choice: Choice | None  # None: K is the request's own, or the request has ended
    plain_step_s: float | None  # the estimated time of the step without drafts, if known


class Notebook:
    """An observer of the engine: notes on watched requests, by (id, step)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watched: set[str] = set()
        self._notes: dict[tuple[str, int], Note] = {}
        engine.observers.append(self)

    def open(self, request_id: str) -> None:
        """Call it before the request is submitted."""
        self._watched.add(request_id)

    def close(self, request_id: str) -> None:
        self._watched.discard(request_id)
        for key in [key for key in list(self._notes) if key[0] not in self._watched]:
            self._notes.pop(key, None)

    @property
    def is_empty(self) -> bool:
        return not self._watched and not self._notes

    def take(self, event: StepEvent) -> Note:
        return self._notes.pop((event.request_id, event.step))

    def __call__(self, report: StepReport) -> None:
        """In the engine's thread, between two steps."""
        if not self._watched:
            return
        running = {sequence.request.id: sequence for sequence in self._engine.scheduler.running}
        policy = self._engine.policy
        for event in report.events:
            if event.request_id not in self._watched:
                continue
            choice, plain_s = None, None
            sequence = running.get(event.request_id)  # None once it has finished
            if sequence is not None and isinstance(policy, Explains):
                choice, plain_s = policy.explain(sequence), policy.plain_step_s(sequence)
            self._notes[event.request_id, event.step] = Note(report.timing, choice, plain_s)
            if event.request_id not in self._watched:  # closed by another thread in the meantime
                self._notes.pop((event.request_id, event.step), None)


class Watched:
    """A generation of one choice, and its steps in the form of the live page."""

    def __init__(self, service: Service, ask: Ask, notebook: Notebook, spell: Spelling) -> None:
        self._id = f"live-{secrets.token_hex(12)}"
        self.generation = Generation(
            service,
            replace(ask, request_id=self._id),
            streamed=True,
            detailed=False,
            listener=self._take,
        )
        self._notebook = notebook
        self._spell = spell
        self._steps: list[dict[str, Any]] = []
        self._stats = SpeculationStats()
        self._clock_s = 0.0  # since the first token

    def __enter__(self) -> Watched:
        self._notebook.open(self._id)
        try:
            self.generation.__enter__()
        except BaseException:
            self._notebook.close(self._id)
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        self.generation.__exit__(*exception)
        self._notebook.close(self._id)

    async def steps(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The steps since the last time, at least one."""
        async for _ in self.generation.deltas():
            steps, self._steps = self._steps, []
            yield steps

    def _take(self, events: list[StepEvent]) -> None:
        for event in events:
            note = self._notebook.take(event)
            self._stats.add(event, note.timing)
            if event.step > 1:  # the time of the first step is the prompt's
                self._clock_s += note.timing.draft_s + note.timing.verify_s + note.timing.other_s
            self._steps.append(self._described(event, note))

    def _described(self, event: StepEvent, note: Note) -> dict[str, Any]:
        return {
            "step": event.step,
            "at_s": self._clock_s,
            "pieces": event.pieces,  # of the text, by the token that confirmed each
            "source": event.source,
            "finish_reason": event.finish_reason,
            **_tokens(event, self._spell),
            "timing": asdict(note.timing),
            "choice": None if note.choice is None else asdict(note.choice),
            "plain_step_s": note.plain_step_s,
            "stats": self._stats.to_dict(),
        }


def _tokens(event: StepEvent, spell: Spelling) -> dict[str, Any]:
    """The draft as nodes with parents (-1: the text so far), and the target's own tokens."""
    kept = set(event.path)
    kinds = [kind for kind, _ in judged(event)]
    refused = next((kind for kind in kinds if kind in (Kind.REJECTED, Kind.UNUSED)), None)
    parents = event.draft_parents
    if parents is None:
        parents = list(range(-1, len(event.draft_tokens) - 1))
    nodes = [
        _token(Kind.ACCEPTED if i in kept else refused, spell(token)) | {"parent": parent}
        for i, (token, parent) in enumerate(zip(event.draft_tokens, parents, strict=True))
    ]
    own = [_token(kinds[-1], spell(token)) for token in event.tokens[len(event.path) :]]
    return {"nodes": nodes, "path": event.path, "own": own}


def _token(kind: Kind | None, text: str) -> dict[str, Any]:
    assert kind is not None
    return {"kind": kind.name.lower(), "text": text}


async def frames(watched: Watched, *, padded: bool) -> AsyncGenerator[bytes, None]:
    """The stream of the live page: the request, every step, the result; then `[DONE]`."""
    ask = watched.generation.ask
    with watched:
        yield frame(
            {
                "start": {
                    "num_prompt_tokens": len(ask.prompts[0]),
                    "proposer": ask.speculation.proposer,
                    "num_draft_tokens": ask.speculation.num_draft_tokens,
                }
            },
            padded=padded,
        )
        try:
            async for steps in watched.steps():
                for step in steps:
                    yield frame(step, padded=padded)
            (result,) = await watched.generation.all()
            end = {
                "text": result.text,
                "finish_reason": result.completions[0].finish_reason,
                "seed": result.seed,
                "num_cached_tokens": result.num_cached_tokens,
            }
            yield frame({"end": end}, padded=padded)
        except Exception as error:
            yield frame(api_error(error).body(), padded=padded)
    yield Last(DONE)
