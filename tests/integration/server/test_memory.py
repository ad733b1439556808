"""KV memory that an idle server has provided beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest

from native_models import needs_native
from outrider.model import load_model
from outrider.model.native_decoder import NativeDecoder
from outrider.server import memory
from outrider.server.memory import Populating, available_bytes

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


def test_all_of_it_is_there_before_the_first_request(model: NativeDecoder) -> None:
    num_bytes = NUM_BLOCKS * 16 * model.spec.kv_bytes_per_token
    before = resident_bytes()
    finish(Populating([model], lambda: True))
    assert resident_bytes() - before > 0.9 * num_bytes


def test_scarce_memory_is_left_alone(model: NativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    before = resident_bytes()
    finish(Populating([model], lambda: True))
    assert resident_bytes() - before < 8 << 20


def test_who_serves_has_better_things_to_do(
    model: NativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([True, True, False, False, True])
    pieces = []

    def populate(offset: int, num_bytes: int) -> int:
        pieces.append(offset)
        return num_bytes if len(pieces) < 3 else 0

    monkeypatch.setattr(model, "populate", populate)
    finish(Populating([model], lambda: next(looks)))
    assert pieces == [0, memory.PIECE, 2 * memory.PIECE]
    assert not list(looks)


def test_it_can_be_stopped(model: NativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "populate", lambda offset, num_bytes: num_bytes)  # never the end
    populating = Populating([model], lambda: True)
    populating.stop()
    finish(populating)


def test_available_memory_is_that_of_this_machine() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50
