"""KV memory that an idle server has provided beforehand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest

from native_models import needs_native
from outrider.model import load_model
from outrider.model.native_decoder import NativeDecoder
from outrider.server import memory
from outrider.server.memory import Populating, Store, available_bytes

pytestmark = [
    needs_native,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux"),
]
NUM_BLOCKS = 512


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture
def model() -> NativeDecoder:
    found = load_model("bundled")
    assert isinstance(found, NativeDecoder)
    found.allocate(NUM_BLOCKS, 16)
    return found


def finish(populating: Populating) -> None:
    populating.thread.join(60)
    assert not populating.thread.is_alive()


def populating(
    model: NativeDecoder,
    used: Callable[[], float] = lambda: 0.0,
    is_idle: Callable[[], bool] = lambda: True,
) -> Populating:
    num_bytes = NUM_BLOCKS * 16 * model.spec.kv_bytes_per_token
    return Populating([Store(model, num_bytes)], [0.0, 0.5], used, is_idle)


def settle(working: Populating, num_bytes: int) -> None:
    """Waits until so much is provided, and a little longer: no more may come."""
    deadline = monotonic() + 30
    while working.num_populated < num_bytes and monotonic() < deadline:
        sleep(0.01)
    sleep(0.2)


def test_an_idle_server_has_memory_for_the_first_requests_and_no_more(
    model: NativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "AHEAD", 16 << 20)
    before = resident_bytes()
    working = populating(model)
    settle(working, 16 << 20)
    working.stop()
    assert working.num_populated == 16 << 20
    assert 15 << 20 < resident_bytes() - before < 20 << 20


def test_memory_grows_with_use(model: NativeDecoder) -> None:
    before = resident_bytes()
    finish(populating(model, used=lambda: 0.5))  # all of it
    num_bytes = NUM_BLOCKS * 16 * model.spec.kv_bytes_per_token
    assert resident_bytes() - before > 0.9 * num_bytes


def test_memory_comes_first_where_sequences_begin(
    model: NativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets = []

    def populate(offset: int, num_bytes: int) -> int:
        offsets.append(offset)
        return num_bytes

    monkeypatch.setattr(model, "populate", populate)
    finish(populating(model, used=lambda: 1.0))
    half = NUM_BLOCKS * 8 * model.spec.kv_bytes_per_token // memory.PIECE * memory.PIECE
    assert offsets[:4] == [0, memory.PIECE, half, 2 * memory.PIECE]
    assert len(set(offsets)) == len(offsets)


def test_scarce_memory_is_left_alone(model: NativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    before = resident_bytes()
    finish(populating(model))
    assert resident_bytes() - before < 8 << 20


def test_nothing_is_touched_while_requests_run(
    model: NativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def populate(offset: int, num_bytes: int) -> int:
        calls.append(offset)
        return num_bytes

    monkeypatch.setattr(model, "populate", populate)
    working = populating(model, used=lambda: 1.0, is_idle=lambda: False)
    sleep(0.2)
    working.stop()
    assert not calls


def test_available_memory_is_that_of_this_machine() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50
