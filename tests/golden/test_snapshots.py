"""Options, JSON keys, HTTP bodies and metrics are those that were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from golden import snapshots
from golden.record import read
from golden.snapshots import difference
from outrider import native


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return snapshots.write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def url(pair: list[str]) -> Iterator[str]:
    with snapshots.server(pair) as url:
        yield url


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The server's process has one thread too, so that two cores are enough."""
    if not native.available():
        yield
        return
    before = native.num_threads()
    native.set_threads(1)
    yield
    native.set_threads(before)


def test_options_of_every_command() -> None:
    assert difference(read("commands"), snapshots.commands(), exact=True) is None


@pytest.mark.usefixtures("one_thread")
def test_json_of_every_command(tmp_path: Path, pair: list[str], url: str) -> None:
    assert difference(read("json"), snapshots.outputs(tmp_path, pair, url)) is None


def test_http_bodies(url: str) -> None:
    golden, found = read("http"), snapshots.http(url)
    if not native.available():  # no executor but python, which has no faults to count
        golden["/metrics"]["outrider_executor_faults_total"]["labels"] = []
    for name in golden:
        frames = golden[name].pop("frame", None), found[name].pop("frame", None)
        assert difference(*frames, name) is None
    assert difference(golden, found, exact=True) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"a": [{"b": "1"}], "d": {}},
        {"a": [{"c": 1}], "d": {"1": "x"}},
        {"a": [{"b": 1}], "d": {"1": 1}},
        {"a": [{"b": 1}]},
        {},
    ],
)
def test_shapes_that_lose_something_are_noticed(changed: dict[str, object]) -> None:
    golden = snapshots.shape({"a": [{"b": 1, "c": None}, {"b": 2}], "d": {"1": "x", "2": "y"}})
    assert golden == {"a": [{"b": "number", "c?": "null"}], "d": {"N": "text"}}
    assert difference(golden, snapshots.shape(changed)) is not None


def test_values_that_change_are_noticed() -> None:
    golden = {"a": [1, 2], "b": None}
    assert difference(golden, golden | {"new": 1}, exact=True) is None
    for changed in ({"a": [1], "b": None}, {"a": [1, 3], "b": None}, {"a": [1, 2], "b": "x"}):
        assert difference(golden, changed, exact=True) is not None
