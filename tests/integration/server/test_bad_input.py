"""What a client may get wrong, by accident or on purpose. Rows 30-33, 36, 38-40 of the matrix."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from outrider.engine.build import EngineConfig

from .live import JSON, PROBE, Live, Target, raw_connection, request_bytes

KEY = "sesame-open-up-1234567890"
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/nonesuch"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"),
    ("PUT", "/v1/completions"),
]


@pytest.fixture(scope="module")
def keyed(engine_config: EngineConfig) -> Iterator[Live]:
    config = {"api_keys": ("another-key", KEY), "max_body_bytes": 1 << 20}
    with Live(engine_config, **config) as live:
        yield live
        live.check()


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal, which is always there and always whole."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 500
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "n": 10**9}, "n"),
        ({"prompt": ["x"] * 10**5}, "prompt"),
        ({"prompt": [[1]] * 10**5}, "prompt"),
        ({"prompt": "x", "stop": ["y"] * 10**4}, "stop"),
        ({"prompt": "x", "stop": "y" * 10**5}, "stop"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stop_token_ids": list(range(10**4))}, "stop_token_ids"),
        ({"prompt": "x", "logprobs": 10**4}, "logprobs"),
        ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(10**5)}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"319": 1}}, "logit_bias"),
        ({"prompt": "x", "n": 2, "best_of": 1}, None),
        ({"prompt": "x", "best_of": 5, "stream": True}, None),
        ({"prompt": "x", "best_of": 17}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [300]}, "prompt"),  # padding of the embedding: no token
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": ["x", 1]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"prompt": "x", "stream_options": {}}, None),
        ({"prompt": "x", "cache_salt": "y" * 10**5}, "cache_salt"),
    ],
)
def test_row_30_too_much_is_refused_at_once(
    live: Live, body: dict[str, Any], param: str | None
) -> None:
    started = time.monotonic()
    error = refused(live.post("/v1/completions", body))
    assert error["param"] == param
    assert time.monotonic() - started < 10


NUMBERS = [
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "max_tokens",
    "min_tokens",
    "top_k",
    "n",
    "seed",
    "logprobs",
]
FINE = {  # -1 means something for these
    ("presence_penalty", "-1"),
    ("frequency_penalty", "-1"),
    ("top_k", "-1"),
    ("seed", "-1"),
}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "-1", str(2**63), "true", '"1"'])
def test_row_31_numbers_that_are_none(live: Live, value: str) -> None:
    for name in NUMBERS:
        if (name, value) in FINE:
            continue
        body = f'{{"prompt": "x", "{name}": {value}}}'
        response = live.client.post("/v1/completions", content=body, headers=JSON)
        assert refused(response)["param"] == name, (name, value)


def test_row_32_headers_and_bodies_that_are_too_large(keyed: Live) -> None:
    with raw_connection(keyed) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Large: ")
        with pytest.raises(ConnectionError):  # noqa: PT012 (the server may hang up at any time)
            for _ in range(64):
                connection.sendall(b"x" * (1 << 14))
            connection.sendall(b"\r\n\r\n")
            answer = connection.recv(4096)
            assert b" 400 " in answer.split(b"\r\n")[0]
            raise ConnectionError
    head = request_bytes(keyed, "/v1/completions", b"", Content_Length=str(100 << 20))
    with raw_connection(keyed) as connection:
        connection.sendall(head)
        assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]
    with raw_connection(keyed) as connection:  # a length nobody declared
        chunked = head.replace(b"Content-Length: 104857600", b"Transfer-Encoding: chunked")
        connection.sendall(chunked)
        answer = b" 413 "  # unless the connection is gone before anybody can read it
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
            answer = connection.recv(4096)
        assert b" 413 " in answer.split(b"\r\n")[0]


@pytest.mark.parametrize("line", ["head", "chunk", "trailer"])
def test_row_32_a_line_that_never_ends(keyed: Live, line: str) -> None:
    """Nothing but a limit of ours would end these: no route sees them before they are complete."""
    begun = request_bytes(keyed, "/v1/completions", b"", Content_Length="0")
    chunked = begun.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    sent = {
        "head": begun[:-2] + b"X-Large: ",
        "chunk": chunked + b"1;",
        "trailer": chunked + b"1\r\n{\r\n0\r\nX-Large: ",
    }
    with raw_connection(keyed) as connection:
        connection.sendall(sent[line])
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            while num_sent < 16 << 20:
                connection.sendall(b"x" * (1 << 14))
                num_sent += 1 << 14
        assert num_sent < 16 << 20


@pytest.mark.parametrize("size", [20 << 10, 40 << 10])
def test_row_32_a_whole_head_has_a_size(keyed: Live, size: int) -> None:
    with raw_connection(keyed) as connection:
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Large: "
        connection.sendall(head + b"x" * size + b"\r\n\r\n")
        status = connection.recv(4096).split(b"\r\n")[0]
    assert (b" 200 " if size < keyed.config.max_header_bytes else b" 400 ") in status


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: "])
def test_row_32_a_head_that_takes_its_time(
    keyed: Live, monkeypatch: pytest.MonkeyPatch, sent: bytes, kept: bool
) -> None:
    """Whoever opens connections and says nothing would otherwise have them all one day."""
    monkeypatch.setattr(keyed.server.config, "timeout_keep_alive", 0.5)
    with raw_connection(keyed) as connection:
        if kept:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in connection.recv(4096).split(b"\r\n")[0]
        started = time.monotonic()
        connection.sendall(sent)
        connection.settimeout(10)
        assert connection.recv(1) == b""
        assert 0.3 < time.monotonic() - started < 5


def test_an_answer_that_takes_longer_than_a_head_may(
    keyed: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed.server.config, "timeout_keep_alive", 0.1)
    Target(keyed, monkeypatch).delay_s = 0.05
    # Not by a kept connection, which still has the time it began with.
    with httpx.Client(base_url=keyed.url, headers=keyed.client.headers) as client:
        reply = client.post("/v1/completions", json=PROBE)
    assert reply.json()["choices"][0]["text"] == keyed.expected_probe


def test_row_32_a_body_that_takes_its_time(keyed: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed.service, "config", replace(keyed.config, body_timeout_s=0.5))
    started = time.monotonic()
    with raw_connection(keyed) as connection:
        connection.sendall(request_bytes(keyed, "/v1/completions", b"{", Content_Length="100"))
        answer = connection.recv(4096)
    assert b" 408 " in answer.split(b"\r\n")[0]
    assert 0.4 < time.monotonic() - started < 15


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"[" * 100_000, 400),
        (b'{"prompt": ' + b'{"a": ' * 50_000 + b"1" + b"}" * 50_001, 400),
        (b"\x00", 400),
        (b"", 400),
        (b"null", 400),
        (b"[]", 400),
        (b'"text"', 400),
        (b'{"prompt": "x"', 400),
        (b'{"prompt": "\xff\xfe"}', 400),
        (b'{"prompt": "\\ud800", "max_tokens": 1}', 400),
        (b'{"prompt": "x", "cache_salt": "\\ud800", "max_tokens": 1}', 400),
        (b'{"prompt": "x", "stop": "\\ud800", "max_tokens": 1}', 400),
        (b'{"prompt": "a\\u0000b", "max_tokens": 1}', 200),  # a character like any other
        (b'{"prompt": "x", "prompt": "y", "max_tokens": 1}', 200),
        (b'\xef\xbb\xbf{"prompt": "x", "max_tokens": 1}', 200),
    ],
)
def test_row_33_json_that_is_none(live: Live, content: bytes, status: int) -> None:
    response = live.client.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == status, response.text
    if status != 200:
        refused(response)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_row_33_other_content_types(live: Live, kind: str) -> None:
    response = live.client.post(
        "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind}
    )
    refused(response, 415)


def test_row_36_braces_of_users_mean_nothing(live: Live) -> None:
    for text in ("{{ 7 * 7 }}", "{% for i in range(9) %}", "{{ messages.__class__ }}", "{# a #}"):
        messages = [{"role": "user", "content": text}]
        tokens = live.post("/tokenize", {"messages": messages}).json()["tokens"]
        framed = live.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        assert framed == f"[user] {text}\n[assistant] "
        response = live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert response.status_code == 200
    for field in ("chat_template", "chat_template_kwargs", "documents"):
        body = {"messages": [{"role": "user", "content": "x"}], field: "{{ 7 * 7 }}"}
        error = refused(live.post("/v1/chat/completions", body))
        assert error["param"] == field


@pytest.mark.parametrize("host", ["localhost", "evil.example", "health", "a/health?", "[::1]@x"])
def test_row_38_no_host_header_opens_a_route(keyed: Live, host: str) -> None:
    keys = ["", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"]
    with httpx.Client(base_url=keyed.url) as client:
        for i, (method, path) in enumerate(ROUTES * 3):
            headers = {"host": host, "authorization": keys[i % len(keys)]} | JSON
            response = client.request(method, path, headers=headers, content=b"{}")
            error = refused(response, 401)
            assert error["code"] == "invalid_api_key"
        assert client.get("/health", headers={"host": host}).status_code == 200
        for path in ("/api/tags", "/props", "/v1/messages"):
            assert client.get(path, headers={"host": host}).status_code == 401
    assert keyed.client.get("/v1/models", headers={"host": host}).status_code == 200


def test_row_38_paths_that_look_like_open_ones(keyed: Live) -> None:
    for path in (
        "/health/../v1/models",
        "//health",
        "/health%2f..%2fv1%2fmodels",
        "/v1/models?/health",
    ):
        with raw_connection(keyed) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert b" 401 " in connection.recv(4096).split(b"\r\n")[0], path


def test_without_keys_only_local_names_are_answered(live: Live) -> None:
    """A page in a browser can resolve its own name to this machine."""
    for host in ("evil.example", f"evil.example:{live.port}", "127.0.0.1.evil.example", ""):
        headers = {"host": host} | JSON
        response = live.client.post("/v1/completions", json=PROBE, headers=headers)
        assert refused(response, 403)["code"] == "forbidden_host"
    for host in ("localhost", "127.0.0.1:80", f"[::1]:{live.port}", "LOCALHOST"):
        assert live.client.get("/version", headers={"host": host}).status_code == 200


def test_row_39_errors_leak_nothing(
    keyed: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(100)
    folder = str(keyed.core.tokenizer.folder)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError(f"{folder}/model.safetensors at 0x7f0012 with {KEY}")

    responses = [
        keyed.post("/v1/completions", PROBE | {"model": folder}),
        keyed.post("/v1/completions", PROBE | {"x" * 10_000: 1}),
        keyed.post("/v1/completions", PROBE | {"speculation": {"proposer": "y" * 250}}),
        keyed.client.get("/nonesuch"),
        keyed.client.put("/v1/completions"),
        httpx.get(f"{keyed.url}/v1/models", headers={"authorization": f"Bearer {KEY}!"}),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(type(keyed.service.served.tokenizer), "encode", broken)
        responses.append(keyed.post("/v1/completions", PROBE))
        responses.append(keyed.post("/tokenize", {"prompt": "x"}))
    assert [r.status_code for r in responses] == [404, 400, 400, 404, 405, 401, 500, 500]
    for response in responses:
        for secret in ("safetensors", "0x7f", KEY, "Traceback", ".py", "RuntimeError"):
            assert secret not in response.text
        assert len(response.content) < 1200
        assert "server" not in response.headers


def test_row_40_media_is_refused_and_nothing_is_fetched(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[object] = []
    connect = socket.socket.connect

    def watch(self: socket.socket, address: Any) -> None:
        if address[1] != live.port:
            connected.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watch)
    url = "http://169.254.169.254/latest/meta-data"
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "file", "file": {"file_id": url}},
    ):
        messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]
        error = refused(live.post("/v1/chat/completions", {"messages": messages}))
        assert "only text" in error["message"]
    assert not connected


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
        {"messages": [{"role": "user", "content": "x"}], "modalities": ["audio"]},
        {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0},
        {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 1,
            "max_completion_tokens": 2,
        },
        {"messages": [{"role": "user", "content": "x"}] * 2000},
    ],
)
def test_chats_that_cannot_be(live: Live, body: dict[str, Any]) -> None:
    refused(live.post("/v1/chat/completions", body))


def test_what_sdks_echo_back_is_fine(live: Live) -> None:
    echoed = {"role": "assistant", "content": "hm", "refusal": None, "tool_calls": None}
    body = {"messages": [{"role": "user", "content": "x"}, echoed], "max_tokens": 2, "tools": []}
    assert live.post("/v1/chat/completions", body).status_code == 200


def test_bodies_are_read_once_and_connections_go_on(live: Live) -> None:
    """A refused request leaves a connection that works, where its body was read."""
    with httpx.Client(base_url=live.url) as client:
        for _ in range(3):
            assert client.post("/v1/completions", json={"prompt": 5}).status_code == 400
            assert client.post("/v1/completions", json=PROBE).status_code == 200


def test_large_valid_bodies_pass(live: Live) -> None:
    messages = [{"role": "user", "content": "x" * 3_000_000}]
    response = live.post("/v1/chat/completions", {"messages": messages})
    assert refused(response)["code"] == "context_length_exceeded"
    assert json.loads(response.content)
