"""Replicas of the native engine behind Ray Serve's router: `serve run ray_serve:app`.

Not run by this project, which has no Ray cluster; its tests run everything but Ray itself. vLLM
on a Ray cluster needs no such file: `outrider serve --backend vllm` takes
`--distributed-executor-backend ray`.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from starlette.requests import Request

from outrider import LLM, AsyncEngine, OutriderError, SamplingParams


@serve.deployment(
    num_replicas=2,
    max_ongoing_requests=64,
    ray_actor_options={"num_cpus": 8},
    graceful_shutdown_timeout_s=60,
)
class Outrider:
    def __init__(self, model: str, draft_model: str | None = None) -> None:
        self.engine = AsyncEngine(LLM(model, draft_model=draft_model).engine)

    async def __call__(self, request: Request) -> dict[str, Any]:
        """`{"prompt": ..., "max_tokens": ..., "temperature": ..., "seed": ...}`"""
        body = await request.json()
        try:
            prompt = body.pop("prompt")
            result = await self.engine.generate(prompt, params=SamplingParams(**body))
        except (KeyError, TypeError, OutriderError) as error:
            return {"error": str(error)}
        return {"text": result.text, "acceptance_length": result.stats.acceptance_length}

    async def check_health(self) -> None:
        """Ray restarts a replica for which this raises."""
        if self.engine.stalled_s > 120:
            raise RuntimeError("the engine does not answer")


app = Outrider.bind("/models/target", "/models/draft")
