"""Bodies made from our own API description, right and wrong ones. Row 34 of the fault matrix."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode

from .live import Live

POSTED = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/input_tokens",
    "/predict",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/conversations",
    "/v1/conversations/{id}",
    "/v1/conversations/{id}/items",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/api/embed",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/generative_scoring",
    "/completion",
    "/infill",
    "/apply-template",
    "/embedding",
    "/generate",
    "/tokenize",
    "/detokenize",
]


def test_every_route_with_a_body_is_tried(live: Live) -> None:
    paths = live.client.get("/openapi.json").json()["paths"]
    taken = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert taken == set(POSTED)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", POSTED)
def test_row_34_no_body_breaks_the_server(live: Live, path: str, mode: GenerationMode) -> None:
    description = live.client.get("/openapi.json").json()
    operation = schemathesis.openapi.from_dict(description)[path]["post"]

    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Case[Any]) -> None:
        response = case.call(base_url=live.url, timeout=30)
        assert response.status_code < 500, case.body
        if response.status_code >= 400:
            assert response.json()["error"]
            if not path.startswith(("/v1/messages", "/api/")):
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()
