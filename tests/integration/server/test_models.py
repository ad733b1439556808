"""Several models in one process: lazy loading, idle unloading, a limit of memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.server.models import Models, find_models, make_models_app, size_of
from outrider.server.run import Server, bind
from outrider.server_config import ServerConfig
from outrider.testing import write_tiny_llama

from .live import chunks_of, wait_for

BODY: dict[str, Any] = {"prompt": "once", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("a", "b", "c")):
        write_tiny_llama(root / name, vocab_size=320, num_tokens=300, seed=seed)
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text("{}")
    (root / "no model").mkdir()
    return root


@contextmanager
def running(folder: Path, **config: Any) -> Iterator[tuple[Models, httpx.Client]]:
    def load(path: Path) -> Engine:
        return build(EngineConfig(model=str(path), proposer="ngram", num_draft_tokens=2, threads=1))

    settings = ServerConfig(port=0, models_dir=str(folder), **config)
    models = Models(settings, find_models(folder), load)
    listener = bind(settings)
    server = Server(models, make_models_app(models))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=60) as client:
            yield models, client
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def said(client: httpx.Client, model: str | None, **more: Any) -> str:
    response = client.post("/v1/completions", json=BODY | {"model": model} | more)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_models_are_found_by_what_they_are(folder: Path, tmp_path: Path) -> None:
    assert list(find_models(folder)) == ["a", "b", "broken", "c"]
    for wrong in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError):
            find_models(wrong)


def test_a_model_is_loaded_when_a_request_names_it(folder: Path) -> None:
    with running(folder) as (models, client):
        assert client.get("/health").json() == {"status": "ok", "loaded": []}
        cards = client.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["a", "b", "broken", "c"]
        assert not any(card["loaded"] for card in cards)
        first = said(client, "a")
        assert models.loaded == ["a"]
        assert said(client, "b") != first
        assert said(client, "a") == first
        assert said(client, None) == first  # the one that was used last
        reply = client.post("/v1/completions", json=BODY | {"model": "a", "stream": True})
        chunks = chunks_of(reply.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == first
        assert {chunk["model"] for chunk in chunks} == {"a"}
        assert client.get("/v1/models/b").json()["max_model_len"] == 512
        generated = {"model": "b:latest", "prompt": "x", "stream": False}
        assert client.post("/api/generate", json=generated).json()["model"] == "b"
        page = client.get("/metrics").text
        assert page.count("# TYPE vllm:generation_tokens_total counter") == 1
        for name in ("a", "b"):
            assert f'vllm:generation_tokens_total{{model_name="{name}"}}' in page


def test_what_cannot_be_loaded_is_refused_and_tried_again(folder: Path) -> None:
    with running(folder) as (models, client):
        for _ in range(2):
            reply = client.post("/v1/completions", json=BODY | {"model": "broken"})
            assert reply.status_code == 503
            assert "broken" in reply.json()["error"]["message"]
            assert "config" not in reply.text
        unknown = client.post("/v1/messages", json={"model": "d", "messages": [], "max_tokens": 1})
        assert unknown.status_code == 404
        assert unknown.json()["type"] == "error"
        assert said(client, "a")
        assert models.loaded == ["a"]


def test_idle_models_are_unloaded_but_not_those_that_stream(folder: Path) -> None:
    with running(folder, model_idle_s=0.5) as (models, client):
        first = said(client, "a")
        wait_for(lambda: models.loaded == [], timeout_s=20)
        assert said(client, "a") == first
        long = BODY | {"model": "b", "max_tokens": 400, "stream": True}
        with client.stream("POST", "/v1/completions", json=long) as stream:
            text = ""
            for piece in stream.iter_text():
                text += piece
                assert "b" in models.loaded
        assert len(chunks_of(text)) > 1


def test_the_longest_unused_model_makes_room(folder: Path) -> None:
    size = size_of(folder / "a")
    with running(folder, models_memory=2 * size + 100) as (models, client):
        first = said(client, "a")
        said(client, "b")
        said(client, "a")
        said(client, "c")
        assert sorted(models.loaded) == ["a", "c"]
        assert said(client, "a") == first
    with running(folder, models_memory=size - 1) as (models, client):
        assert client.post("/v1/completions", json=BODY | {"model": "a"}).status_code == 503


def test_models_switch_under_load(folder: Path) -> None:
    """Six clients, three models, room for two: every answer is right, or asks for patience."""
    size = size_of(folder / "a")
    with running(folder, models_memory=2 * size + 100) as (models, client):
        expected = {name: said(client, name) for name in ("a", "b", "c")}
        wrong: list[str] = []

        def ask(offset: int) -> None:
            for i in range(9):
                name = "abc"[(i + offset) % 3]
                reply = client.post("/v1/completions", json=BODY | {"model": name})
                if reply.status_code == 503:
                    continue
                if reply.json()["choices"][0]["text"] != expected[name]:
                    wrong.append(reply.text)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert client.get("/health").status_code == 200
        assert len(models.loaded) <= 2


def test_keys_are_checked_before_anything_is_loaded(folder: Path) -> None:
    with running(folder, api_keys=("sesame",)) as (models, client):
        assert client.post("/v1/completions", json=BODY | {"model": "a"}).status_code == 401
        assert models.loaded == []
        headers = {"authorization": "Bearer sesame"}
        reply = client.post("/v1/completions", json=BODY | {"model": "a"}, headers=headers)
        assert reply.status_code == 200


def test_the_command_serves_a_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from outrider.cli.app import app
    from outrider.cli.errors import run

    served: list[Models] = []

    def ended(service: Models, app: object, listener: object) -> int:
        served.append(service)
        return 0

    def leave(code: int) -> None:  # the real one ends the process if engines of other tests live
        raise typer.Exit(code)

    monkeypatch.setattr("outrider.cli.serve.leave", leave)
    monkeypatch.setattr("outrider.server.run.run", ended)
    monkeypatch.setattr("outrider.server.logs.set_up", lambda form, level: None)
    assert run(app, ["serve", "--models-dir", str(folder), "--port", "0", "--model-idle", "9"]) == 0
    assert list(served[0].paths) == ["a", "b", "broken", "c"]
    assert served[0].config.model_idle_s == 9
    assert "loading a, b, broken, c on http://" in capfd.readouterr().err
    assert run(app, ["serve", "--models-dir", str(tmp_path), "--port", "0"]) == 2
    assert "holds no models" in capfd.readouterr().err
