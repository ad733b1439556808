"""Options, JSON keys, HTTP bodies and metrics are those that were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from golden import snapshots
from golden.record import read
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
    assert snapshots.commands() == read("commands")


@pytest.mark.usefixtures("one_thread")
def test_json_of_every_command(tmp_path: Path, pair: list[str], url: str) -> None:
    golden, found = read("json"), snapshots.outputs(tmp_path, pair, url)
    assert found.keys() == golden.keys()
    for name in golden:
        assert snapshots.difference(golden[name], found[name]) is None, name


def test_http_bodies(url: str) -> None:
    golden, found = read("http"), snapshots.http(url)
    assert found.keys() == golden.keys()
    for name in golden:
        frames = golden[name].pop("frame", None), found[name].pop("frame", None)
        assert snapshots.difference(*frames) is None, name
        assert found[name] == golden[name], name


def test_shapes_that_differ_are_noticed() -> None:
    golden = snapshots.shape({"a": [{"b": 1, "c": None}, {"b": 2}], "d": {"1": "x", "2": "y"}})
    assert golden == {"a": [{"b": "number", "c?": "null"}], "d": {"N": "text"}}
    for other in ({"a": [{"b": "1"}], "d": {}}, {"a": [{"b": 1, "e": 2}], "d": {"1": "x"}}, {}):
        assert snapshots.difference(golden, snapshots.shape(other)) is not None
