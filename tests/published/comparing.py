"""Runs an engine with a drafter and compares each draft with a reference, step after step.

The temperature is high: target and drafter share the noise of a draw, so that drafts are accepted
and rejected in turns and the keys and values of both outcomes are used.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from outrider.contracts import Model, Stream
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.model import load_model
from outrider.model.borrowed import Borrowed, borrow
from outrider.model.driver import Driver
from outrider.model.head_kinds import head_kind
from outrider.noise import draw_key, gumbel
from outrider.sampling import SamplingParams
from published.cases import Reference
from published.references import Draw, Shown

PROMPTS = [[5, 9, 5, 9, 2], list(range(1, 30))]
TEMPERATURE, SEED, K = 4.0, 3, 6
NEAR = 0.03  # a lead of one score over another that rounded weights may turn


class Seen:
    """The target without drafts: what a drafter sees of a text."""

    def __init__(self, target: Path) -> None:
        self.model: Model = load_model(target, backend="torch")
        self.borrowed: Borrowed = borrow(target, torch.device("cpu"), torch.float32)

    def shown(self, text: list[int]) -> Shown:
        borrowed, depth = self.borrowed, self.model.spec.num_layers
        taps = Driver(self.model).forward({"a": text[:-1]}, taps=tuple(range(depth + 1))).taps
        states = {tap: found["a"] for tap, found in taps.items()}
        last = borrowed.normed(states[depth])
        return Shown(text, states, last, borrowed.embedding_VH, borrowed.logits)


def engine_for(target: Path, folder: Path, backend: str, **options: object) -> Engine:
    """Chosen by the folder alone, as `--draft-model` does."""
    kind = head_kind(folder)
    assert kind is not None
    return build(
        EngineConfig(
            model=str(target),
            draft_model=str(folder),
            proposer_options={kind: options} if options else {},
            num_draft_tokens=K,
            kv_tokens=512,
            block_size=4,
            backend=backend,  # type: ignore[arg-type]
        )
    )


def following(
    drafted: list[int], wanted: list[int], start: int, leads: list[float] | None = None
) -> Draw:
    """Draws that are noted in `wanted`, while the reference goes on with the tokens `drafted`.

    So every draft is compared for itself, given the drafts before it. `leads`: by how much each
    draw's score beats the runner-up's.
    """

    def draw(row_V: torch.Tensor, place: int) -> int:
        key = draw_key(SEED, 0, place, Stream.TARGET)
        row_V = row_V / TEMPERATURE + gumbel([key], len(row_V), row_V.device)[0]
        wanted.append(int(row_V.argmax()))
        if leads is not None:
            first, second = row_V.topk(2)[0].tolist()
            leads.append(first - second)
        return drafted[place - start]

    return draw


@torch.no_grad()
def compare(
    engine: Engine, reference: Reference, seen: Seen, *, trees: bool = False
) -> Counter[str]:
    """Runs two requests and compares every draft; of a tree, the first child of every node."""
    params = SamplingParams(temperature=TEMPERATURE, seed=SEED, max_tokens=44, ignore_eos=True)
    ids = [engine.add(prompt, params) for prompt in PROMPTS]
    texts = dict(zip(ids, map(list, PROMPTS), strict=True))
    count: Counter[str] = Counter()
    for report in engine.run(ids):
        for event in report.events:
            text, drafted = texts[event.request_id], event.draft_tokens
            if drafted:
                shown = seen.shown(text)
                lines = lines_of(drafted, event.draft_parents) if trees else [drafted]
                for line in lines:
                    wanted: list[int] = []
                    leads: list[float] = []
                    draw = following(line, wanted, len(text), leads)
                    reference.draft(shown, len(line), draw)
                    first = len(line) - 1 if trees else 0  # shorter lines have the others
                    same = list(map(int.__eq__, line[first:], wanted[first:]))
                    clear = [lead >= NEAR for lead in leads[first:]]
                    count["drafts"] += len(same)
                    count["same"] += sum(same)
                    count["clear"] += sum(clear)
                    count["clear and same"] += sum(map(int.__and__, clear, same))
                count["whole drafts"] += len(drafted) == K and not trees
                count["branches"] += len(lines) - max(map(len, lines))
                count["steps"] += 1
                count["accepted"] += len(event.tokens) - 1
                count["rejecting steps"] += len(event.tokens) <= max(map(len, lines))
            text += event.tokens
    return count


def lines_of(tokens: list[int], parents: list[int] | None) -> list[list[int]]:
    """Of a tree, the way to the first child of every node that has one; of a chain, of every node.

    A later child is a runner-up, of which the reference says nothing.
    """
    parents = list(range(-1, len(tokens) - 1)) if parents is None else parents
    ways: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        ways.append([*(ways[parent] if parent >= 0 else []), token])
    firsts = {parent: node for node, parent in reversed(list(enumerate(parents)))}
    return [ways[node] for node in sorted(firsts.values())]
