"""What browsers, proxies and users of other servers expect around the API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.app import app
from outrider.cli.errors import run
from outrider.engine.build import EngineConfig
from outrider.errors import ConfigError
from outrider.server_config import ServerConfig

from .live import JSON, PROBE, Live, with_options


def test_head_where_get_is(live: Live) -> None:
    for path in ("/health", "/v1/models", "/metrics"):
        response = live.client.head(path)
        assert (response.status_code, response.content) == (200, b"")


def test_slashes_too_many_mean_nothing(live: Live) -> None:
    for path in ("/v1/models/", "//v1//models", "/health/"):
        assert live.client.get(live.url + path).status_code == 200, path
    assert live.client.get(live.url + "/v1/models/").json()["data"][0]["id"] == "tiny"


def test_a_foreign_host_learns_what_to_set(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"host": "host.docker.internal:8000"}
    refused = live.client.get("/version", headers=headers)
    assert refused.status_code == 403
    assert "--allow-host" in refused.json()["error"]["message"]
    allowed = replace(live.config, allow_hosts=("host.docker.internal",))
    monkeypatch.setattr(live.service, "config", allowed)
    assert live.client.get("/version", headers=headers).status_code == 200
    for host in ("evil.example", "host.docker.internal.evil.example", "x:host.docker.internal"):
        assert live.client.get("/version", headers={"host": host}).status_code == 403


def test_pages_of_named_origins_only(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = {"origin": "http://localhost:3000"}
    asked = origin | {"access-control-request-method": "POST"}
    for headers in (origin, asked):
        method = "OPTIONS" if headers is asked else "GET"
        answer = live.client.request(method, "/version", headers=headers)
        assert "access-control-allow-origin" not in answer.headers
    config = replace(live.config, cors_origins=("http://localhost:3000",))
    monkeypatch.setattr(live.service, "config", config)
    ahead = live.client.options(
        "/v1/chat/completions",
        headers=asked | {"access-control-request-headers": "authorization, content-type"},
    )
    assert ahead.status_code == 200
    assert ahead.headers["access-control-allow-headers"] == "authorization, content-type"
    for method, path in (("GET", "/version"), ("GET", "/nonesuch")):
        answer = live.client.request(method, path, headers=origin)
        assert answer.headers["access-control-allow-origin"] == origin["origin"]
    other = live.client.get("/version", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    config = replace(live.config, cors_origins=("localhost",))
    monkeypatch.setattr(live.service, "config", config)
    for name in ("http://localhost", "https://127.0.0.1:3000", "http://[::1]:8080"):
        answer = live.client.get("/version", headers={"origin": name})
        assert answer.headers["access-control-allow-origin"] == name
    for name in ("http://localhost.evil.example", "http://evil.example"):
        refused = live.client.options("/version", headers=asked | {"origin": name})
        assert refused.status_code == 200
        assert "access-control-allow-origin" not in refused.headers


def test_a_path_of_a_proxy(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live.client.get("/llm/health").status_code == 404
    monkeypatch.setattr(live.service, "config", replace(live.config, root_path="/llm"))
    for path in ("/llm/health", "/health", "/llm/v1/models"):
        assert live.client.get(path).status_code == 200
    assert live.client.get("/llmx/health").status_code == 404


def test_other_names_of_the_model(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live.post("/v1/completions", PROBE | {"model": "gpt-4o"}).status_code == 404
    monkeypatch.setattr(live.service, "config", replace(live.config, model_aliases=("gpt-4o",)))
    assert live.text(**PROBE, model="gpt-4o") == live.expected_probe
    cards = live.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "gpt-4o"]
    assert live.post("/v1/completions", PROBE | {"model": "other"}).status_code == 404
    monkeypatch.setattr(live.service, "config", replace(live.config, any_model_name=True))
    assert live.text(**PROBE, model="whatever") == live.expected_probe


@pytest.mark.parametrize("key", [None, "sesame"])
def test_the_start_says_what_runs_where(
    engine_config: EngineConfig, capfd: pytest.CaptureFixture[str], key: str | None
) -> None:
    from outrider.cli.serve import announce

    keys = {} if key is None else {"api_keys": (key,)}
    with Live(engine_config, **keys) as live:
        announce(live.service, live.url, "float32")
    said = capfd.readouterr().err
    for text in (
        f"{live.url}/v1",
        f"{live.url}/live",
        "tiny: ",
        "512 tokens of context",
        "float32",
    ):
        assert text in said
    assert "draft-model, K 3" in said
    assert "8192 tokens" in said
    assert ("Authorization: Bearer KEY" in said) == (key is not None)
    assert key is None or key not in said


def test_openapi_has_a_page(live: Live) -> None:
    assert "openapi.json" in live.client.get("/docs").text


@pytest.mark.parametrize("path", ["/", "/docs", "/live"])
def test_pages_load_nothing_from_elsewhere(live: Live, path: str) -> None:
    answer = live.client.get(path)
    assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', answer.text)
    assert loaded
    for address in loaded:
        assert "//" not in address
        if not address.startswith("data:"):
            assert live.client.get(f"/{address.lstrip('/')}").status_code == 200
    assert live.client.get("/page/unknown.js").status_code == 404


def test_the_root_says_what_runs_here(live: Live) -> None:
    answer = live.client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "<dd>tiny, " in answer.text
    for path in ("live", "docs", "v1/models", "metrics"):
        assert f'<a href="{path}">' in answer.text
        assert live.client.get(f"/{path}").status_code == 200
    assert live.client.head("/").status_code == 200


def test_the_root_of_a_model_with_an_odd_name(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = replace(live.config, model_name="<script>alert(1)</script>")
    monkeypatch.setattr(live.service, "config", odd)
    assert "<script>" not in live.client.get("/").text
    assert "&lt;script&gt;" in live.client.get("/").text


def test_harmless_fields_and_strict_servers(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    body = PROBE | {"user": "me", "keep_alive": "5m", "service_tier": "auto", "metadata": None}
    assert live.text(**body) == live.expected_probe
    monkeypatch.setattr(live.service, "config", replace(live.config, strict=True))
    error = live.post("/v1/completions", body).json()["error"]
    assert error["param"] == "user"
    assert live.text(**PROBE, metadata=None) == live.expected_probe


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"stop": ["x"] * 17}, "stop", "at most 16 stop strings"),
        ({"stop": [""]}, "stop", "1 to 256 characters"),
        ({"logit_bias": {"319": 1}}, "logit_bias", "token ids must be in"),
    ],
)
def test_errors_name_what_the_client_wrote(
    live: Live, more: dict[str, Any], param: str, says: str
) -> None:
    error = live.post("/v1/completions", PROBE | more).json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert "banned_ids" not in error["message"]


def test_usage_is_left_out_on_request(live: Live) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    chunks = live.stream(**PROBE, stream_options=options)
    assert not any("usage" in chunk for chunk in chunks)


@pytest.fixture(scope="module")
def opinionated(
    engine_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    """A model whose generation_config.json has sampling parameters."""
    source = Path(engine_config.model)
    folder = tmp_path_factory.mktemp("opinionated") / "target"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    own = {"temperature": 0.6, "top_k": 7, "top_p": 0.9, "do_sample": True, "eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(own))
    with Live(with_options(engine_config, model=str(folder), max_model_len=100)) as live:
        yield live
        live.check()


def test_the_models_own_sampling_is_the_default(opinionated: Live) -> None:
    card = opinionated.client.get("/v1/models/tiny").json()
    assert card["sampling_defaults"] == {"temperature": 0.6, "top_k": 7, "top_p": 0.9}
    body = {"prompt": "once upon", "max_tokens": 20, "seed": 4}
    said = opinionated.text(**body, temperature=0.6, top_k=7, top_p=0.9)
    assert opinionated.text(**body) == said
    assert opinionated.text(**body, temperature=1.5, top_k=0, top_p=1.0) != said


def test_max_model_len_limits_a_request(opinionated: Live) -> None:
    assert opinionated.client.get("/v1/models").json()["data"][0]["max_model_len"] == 100
    refused = opinionated.post("/v1/completions", {"prompt": "x" * 100})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    reply = opinionated.complete(prompt="x" * 90, max_tokens=50, ignore_eos=True)
    assert reply["usage"]["total_tokens"] == 100


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--gpu-memory-utilization", "0.9"], "--kv-memory SIZE"),
        (["--api-key", "x"], "--api-key-file FILE"),
        (["--model", "x"], "the first argument"),
        (["--kv-memory", "much"], "such as 2GiB"),
        (["--kv-memory", "1B"], "at least"),
        (["--max-model-len", "100000"], "at most 512"),
    ],
)
def test_options_of_other_servers_name_ours(
    folders: tuple[Path, Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    says: str,
) -> None:
    monkeypatch.setattr("outrider.server.logs.set_up", lambda form, level: None)
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    assert run(app, ["serve", str(folders[0]), "--port", "0", "--threads", "1", *args]) == 2
    assert says in capfd.readouterr().err


def test_sizes_are_read() -> None:
    from outrider.options import read_size

    assert [read_size(text) for text in ("2GiB", "500MB", "1.5 GiB", "4096", "3k")] == [
        2 << 30,
        500_000_000,
        3 << 29,
        4096,
        3000,
    ]


def test_a_get_without_a_body_is_no_reason_to_refuse(live: Live) -> None:
    assert live.client.get("/v1/models", headers=JSON).status_code == 200


def test_sampling_of_requests_that_leave_it_out(engine_config: EngineConfig) -> None:
    with Live(engine_config, sampling={"max_tokens": 3, "seed": 7, "temperature": 0.9}) as server:
        ask = {"messages": [{"role": "user", "content": "hello"}]}
        replies = [server.post("/v1/chat/completions", ask).json() for _ in range(2)]
        assert replies[0]["usage"]["completion_tokens"] == 3
        assert replies[0]["choices"] == replies[1]["choices"]
        card = server.client.get("/v1/models/tiny").json()
        assert card["sampling_defaults"]["temperature"] == 0.9


@pytest.mark.parametrize("wrong", [{"temperatur": 1}, {"temperature": -1}])
def test_sampling_that_does_not_exist_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"sampling: .*temperatur"):
        ServerConfig(sampling=wrong)
