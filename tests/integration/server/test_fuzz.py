"""Bodies made from our own API description, right and wrong ones. Row 34 of the fault matrix."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode

from .live import Live


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
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
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()
