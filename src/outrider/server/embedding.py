"""Embeddings for all dialects: tokens, then the engine's vectors, one input after the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from outrider.engine.embed import Pooling, embedding
from outrider.errors import RequestError
from outrider.server.asking import encode
from outrider.server.service import Service

MAX_INPUTS = 512


class Embedded(NamedTuple):
    vectors: list[list[float]]
    num_tokens: int


async def embed(
    service: Service, inputs: Sequence[str | list[int]], pooling: Pooling = "mean"
) -> Embedded:
    if len(inputs) > MAX_INPUTS:
        raise RequestError(f"at most {MAX_INPUTS} inputs, not {len(inputs)}", "input")
    served = service.served
    prompts = [
        await encode(served, one, "input") if isinstance(one, str) else list(one) for one in inputs
    ]
    for tokens in prompts:
        served.core.check_prompt(tokens, "input")
    vectors = []
    with service.admitted(1):
        for tokens in prompts:
            work = partial(embedding, tokens=tokens, pooling=pooling)
            vectors.append(await served.engine.call(work))
    return Embedded(vectors, sum(map(len, prompts)))
