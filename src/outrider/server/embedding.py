"""Embeddings for all dialects: tokens, then the engine's vectors, one input after the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from outrider.engine.embed import Pooling, embedding
from outrider.errors import RequestError
from outrider.server.asking import check_truncation, encode, prompt_text
from outrider.server.request import Conversation
from outrider.server.service import Service

MAX_INPUTS = 512


class Embedded(NamedTuple):
    vectors: list[list[float]]
    num_tokens: int


async def embed(
    service: Service,
    inputs: Sequence[str | list[int | str] | Conversation],
    pooling: Pooling = "mean",
    *,
    normalised: bool = True,
    special: bool = True,
    limit: int | None = None,
) -> Embedded:
    """`limit`: of longer inputs, that many tokens from the beginning; -1: as many as fit."""
    if len(inputs) > MAX_INPUTS:
        raise RequestError(f"at most {MAX_INPUTS} inputs, not {len(inputs)}", "input")
    served = service.served
    if limit is not None:
        check_truncation(limit, served)
    prompts = []
    for one in inputs:
        if isinstance(one, Conversation):
            text = await prompt_text(one, served)
            tokens = await encode(served, text, "messages", special=False)
        else:
            tokens = []
            for i, part in enumerate([one] if isinstance(one, str) else one):
                if isinstance(part, str):
                    tokens += await encode(served, part, "input", special=special and i == 0)
                else:
                    tokens.append(part)
        if limit is not None:
            del tokens[limit if limit >= 0 else served.max_model_len - 1 :]
        prompts.append(tokens)
    for tokens in prompts:
        served.core.check_prompt(tokens, "input")
    vectors = []
    with service.admitted(1):
        for tokens in prompts:
            work = partial(embedding, tokens=tokens, pooling=pooling, normalised=normalised)
            vectors.append(await served.engine.call(work))
            service.metrics.count_embedded(len(tokens))
    return Embedded(vectors, sum(map(len, prompts)))


def similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of the angle between two vectors of length 1."""
    return sum(x * y for x, y in zip(one, other, strict=True))
