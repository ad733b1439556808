"""Every published layout loads and drafts what its formulas say, step after step.

The temperature is high: target and drafter share the noise of a draw, so that drafts are accepted
and rejected in turns and the keys and values of both outcomes are used.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from native_models import needs_native
from outrider.contracts import Model, Stream
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.model import load_model
from outrider.model.borrowed import Borrowed, borrow
from outrider.model.driver import Driver
from outrider.model.head_kinds import head_kind
from outrider.noise import draw_key, gumbel
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama
from published import CASES, TARGET, L, Reference
from published.references import Draw, Shown

PROMPTS = [[5, 9, 5, 9, 2], list(range(1, 30))]
TEMPERATURE, SEED, K = 4.0, 3, 6
TREES = ("eagle", "eagle3", "medusa")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"), **TARGET)


class Seen:
    """The target without drafts: what a drafter sees of a text."""

    def __init__(self, target: Path) -> None:
        self.model: Model = load_model(target, backend="torch")
        self.borrowed: Borrowed = borrow(target, torch.device("cpu"), torch.float32)

    def shown(self, text: list[int]) -> Shown:
        taps = Driver(self.model).forward({"a": text[:-1]}, taps=tuple(range(L + 1))).taps
        states = {tap: found["a"] for tap, found in taps.items()}
        last = self.borrowed.normed(states[L])
        return Shown(text, states, last, self.borrowed.embedding_VH, self.borrowed.head_VH)


@pytest.fixture(scope="module")
def seen(target: Path) -> Seen:
    return Seen(target)


@pytest.fixture(autouse=True)
def no_drafter_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [r for r in caplog.get_records("call") if r.levelno >= logging.WARNING]


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


def following(drafted: list[int], wanted: list[int], start: int) -> Draw:
    """Draws that are noted in `wanted`, while the reference goes on with the tokens `drafted`.

    So every draft is compared for itself, given the drafts before it.
    """

    def draw(row_V: torch.Tensor, place: int) -> int:
        key = draw_key(SEED, 0, place, Stream.TARGET)
        row_V = row_V / TEMPERATURE + gumbel([key], len(row_V), row_V.device)[0]
        wanted.append(int(row_V.argmax()))
        return drafted[place - start]

    return draw


@torch.no_grad()
def compare(
    engine: Engine, reference: Reference, seen: Seen, *, trees: bool = False
) -> Counter[str]:
    """Runs two requests and compares every draft; a tree down its first children."""
    params = SamplingParams(temperature=TEMPERATURE, seed=SEED, max_tokens=44, ignore_eos=True)
    ids = [engine.add(prompt, params) for prompt in PROMPTS]
    texts = dict(zip(ids, map(list, PROMPTS), strict=True))
    count: Counter[str] = Counter()
    for report in engine.run(ids):
        for event in report.events:
            text, drafted = texts[event.request_id], event.draft_tokens
            if drafted:
                if trees:
                    drafted = first_children(drafted, event.draft_parents)
                wanted: list[int] = []
                draw = following(drafted, wanted, len(text))
                reference.draft(seen.shown(text), len(drafted), draw)
                if len(drafted) == K:
                    count["whole drafts"] += 1
                count["steps"] += 1
                count["drafts"] += len(drafted)
                count["accepted"] += len(event.tokens) - 1
                count["rejecting steps"] += len(event.tokens) <= len(drafted)
                count["same"] += sum(map(int.__eq__, drafted, wanted))
            text += event.tokens
    return count


def first_children(tokens: list[int], parents: list[int] | None) -> list[int]:
    if parents is None:
        return tokens
    path: list[int] = []
    node: int | None = 0
    while node is not None:
        path.append(tokens[node])
        node = next((i for i, parent in enumerate(parents) if parent == node), None)
    return path


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_the_reference(name: str, target: Path, seen: Seen, tmp_path: Path) -> None:
    kind, write = CASES[name]
    reference = write(tmp_path)
    assert head_kind(tmp_path) == kind
    options = {"children": 1} if kind in TREES else {}
    count = compare(engine_for(target, tmp_path, "torch", **options), reference, seen)
    assert count["steps"] >= 20, count
    assert count["whole drafts"] >= 10 or kind in ("medusa", "mlp", "dflash"), count
    assert count["same"] == count["drafts"], count
    assert count["accepted"] > 0, count
    assert count["rejecting steps"] > 0, count


@pytest.mark.parametrize(
    "name",
    [
        *("safeailab", "speculators_two_layers", "sliding_windows", "sliding_last_layer"),
        *("eagle1_with_bias", "eagle1_mistral", "medusa_authors", "medusa_vllm_token_map"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
def test_trees_go_down_the_chain(
    name: str, backend: str, target: Path, seen: Seen, tmp_path: Path
) -> None:
    """Rows of a tree see their own line: the first children are the chain of the reference."""
    _, write = CASES[name]
    reference = write(tmp_path)
    engine = engine_for(target, tmp_path, backend, children=3, weights="float32")
    count = compare(engine, reference, seen, trees=True)
    assert count["drafts"] > 2 * count["steps"], "the trees have no depth"
    assert count["same"] >= 0.99 * count["drafts"], count
    assert count["accepted"] > 0, count


@needs_native
@pytest.mark.parametrize(("weights", "share"), [("float32", 0.99), (None, 0.97)])
@pytest.mark.parametrize("name", CASES)
def test_native_drafts_agree(
    name: str, weights: str | None, share: float, target: Path, seen: Seen, tmp_path: Path
) -> None:
    """On the native engine, with the head's weights as they are and as it prefers them: int8.

    Heads of width 32 lose more by int8 than real ones: one scale serves both inputs of a layer.
    """
    kind, write = CASES[name]
    reference = write(tmp_path)
    options: dict[str, object] = {"weights": weights} if weights else {}
    if kind in TREES:
        options["children"] = 1
    count = compare(engine_for(target, tmp_path, "native", **options), reference, seen)
    assert count["same"] >= share * count["drafts"] > 0, count
