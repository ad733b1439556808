"""The proof for any OpenAI-compatible completions endpoint.

Two properties are visible from outside.

    greedy identity   The same prompts with speculation on and off give the same tokens. Where
                      they differ, the reported logprobs give the margin: within rounding it is a
                      near-tie, anything else is a bug.
    sampled law       At temperature 1 the reported logprobs *are* the distribution of each token,
                      given the text before it. So the counts of "the most probable token was
                      drawn", "the second", ..., "none of the first k" have known means and
                      covariances (a martingale), and a chi-squared test compares the sum.

Off means: another endpoint without speculation, an earlier recording of the same server, or, with
our own server, the same endpoint with drafting off per request.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from math import exp, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import ConfigError, EngineError
from outrider.prove.checks import Check
from outrider.prove.power import POWER, needed, tail

NEAR_TIE = 0.125  # rounding of bfloat16 logits, which most servers compute in
TOP = 5  # alternatives asked for: OpenAI's limit
LEVEL = 1e-4  # chance that a right server fails
SAMPLE_TOKENS = 16  # of each sampled output
MIN_EXPECTED = 10.0  # in a cell of the test
NUM_AT_ONCE = 8
# Tells servers that have defaults of their own to use none; dropped where they are not known.
OURS = {"top_k": 0, "repetition_penalty": 1.0, "ignore_eos": True}
EXTRAS: tuple[dict[str, Any], ...] = ({**OURS, "return_tokens_as_token_ids": True}, OURS, {})
PLAIN: dict[str, Any] = {"speculation": {"num_draft_tokens": 0}}


@dataclass(frozen=True, slots=True)
class Output:
    """One completion: its tokens, and at each of them the most probable ones with logprobs."""

    tokens: list[str]
    logprobs: list[float]
    tops: list[dict[str, float]]


class Refused(EngineError):
    """The endpoint answered with an error. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Endpoint:
    """A server's /v1/completions."""

    url: str
    model: str = ""
    key: str | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0

    @classmethod
    def find(cls, url: str, model: str | None = None, key: str | None = None) -> Endpoint:
        """Looks for the model and for the options the server knows; EngineError if it is none."""
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"--endpoint is a URL like http://127.0.0.1:8000, not {url!r}")
        found = cls(base, model or "", key)
        if not model:
            listed = found._ask("/v1/models").get("data") or []
            if not listed:
                raise EngineError(f"{base} serves no model: give --served-model NAME")
            found.model = listed[0]["id"]
        for extras in EXTRAS:
            found.extras = extras
            try:
                found.complete("a", max_tokens=1)
                return found
            except Refused as error:
                if error.status not in (400, 422) or not extras:
                    raise
        raise AssertionError("the last extras are none")

    def complete(
        self, prompt: str, *, max_tokens: int, temperature: float = 0.0, n: int = 1, **more: Any
    ) -> list[Output]:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "n": n,
            "logprobs": TOP,
            **self.extras,
            **more,
        }
        return [_output(choice) for choice in self._ask("/v1/completions", body)["choices"]]

    def can_be_plain(self) -> bool:
        """Whether a request may switch speculation off, as ours can. Others ignore unknown
        fields, so a nonsensical one must be refused too."""
        try:
            self.complete("a", max_tokens=1, **PLAIN)
        except Refused:
            return False
        try:
            self.complete("a", max_tokens=1, speculation={"num_draft_tokens": "nonsense"})
        except Refused:
            return True
        return False

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                record: dict[str, Any] = json.load(answer)
                return record
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(error.code, f"{self.url}: {_message(error.read())}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise EngineError(f"{self.url}{path} does not answer: {reason}") from None


def _message(content: bytes) -> str:
    try:
        record = json.loads(content)
        error = record.get("error", record)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return content[:200].decode("utf-8", "replace")


def _output(choice: Mapping[str, Any]) -> Output:
    scored = choice.get("logprobs")
    if not scored or not scored.get("top_logprobs"):
        raise EngineError("the endpoint returns no logprobs: nothing can be proven from outside")
    return Output(
        list(scored["tokens"]),
        [float(value) for value in scored["token_logprobs"]],
        [dict(top or {}) for top in scored["top_logprobs"]],
    )


# --- recordings -----------------------------------------------------------------------------------


def save(outputs: Seq[Output], prompts: Seq[str], max_tokens: int, file: Path) -> None:
    record = {
        "prompts": list(prompts),
        "max_tokens": max_tokens,
        "outputs": [asdict(output) for output in outputs],
    }
    file.write_text(json.dumps(record) + "\n")


def load(file: Path, prompts: Seq[str], max_tokens: int) -> list[Output]:
    """ConfigError unless it was recorded with the same prompts and length."""
    try:
        record = json.loads(file.read_text())
        same = (record["prompts"], record["max_tokens"]) == (list(prompts), max_tokens)
        outputs = [Output(**output) for output in record["outputs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is no recording ({type(error).__name__})") from None
    if not same:
        raise ConfigError(f"{file} was recorded with other --prompts or --max-tokens")
    return outputs


# --- the checks -----------------------------------------------------------------------------------


def decode(endpoint: Endpoint, prompts: Seq[str], max_tokens: int, **more: Any) -> list[Output]:
    """Greedy outputs, one after the other: batches would round differently by themselves."""
    return [endpoint.complete(prompt, max_tokens=max_tokens, **more)[0] for prompt in prompts]


def check_greedy(mine: Seq[Output], plain: Seq[Output], near_tie: float = NEAR_TIE) -> Check:
    """The same tokens with and without speculation, but for near-ties."""
    ties: list[float] = []
    troubles: list[str] = []
    for i, (ours, theirs) in enumerate(zip(mine, plain, strict=True), 1):
        if ours.tokens == theirs.tokens:
            continue
        at, margin = _parting(ours, theirs)
        if margin < near_tie:
            ties.append(margin)
        else:
            pair = [o.tokens[at] if at < len(o.tokens) else "the end" for o in (theirs, ours)]
            troubles.append(
                f"prompt {i}: token {at + 1} is {pair[0]!r} without and {pair[1]!r} with "
                f"speculation, with a margin of {margin:.3g}: no near-tie but a bug"
            )
    num_identical = len(mine) - len(ties) - len(troubles)
    num_tokens = sum(len(output.tokens) for output in plain)
    found = [f"{num_identical} of {len(mine)} outputs identical ({num_tokens} tokens)"]
    if ties:
        found.append(f"{len(ties)} parted at a near-tie (margin {max(ties):.1g} at most)")
    if troubles:
        found.append(f"{len(troubles)} differ")
    figures = {
        "num_outputs": len(mine),
        "num_identical": num_identical,
        "num_tokens": num_tokens,
        "near_ties": ties,
        "num_different": len(troubles),
    }
    return Check("greedy identity", not troubles, ", ".join(found), figures, troubles)


def _parting(ours: Output, theirs: Output) -> tuple[int, float]:
    """Where two outputs part, and how much less probable our token was there in the plain run."""
    shorter = min(len(ours.tokens), len(theirs.tokens))
    at = next((i for i in range(shorter) if ours.tokens[i] != theirs.tokens[i]), shorter)
    if at == shorter or ours.tokens[at] not in theirs.tops[at]:
        return at, float("inf")
    return at, theirs.logprobs[at] - theirs.tops[at][ours.tokens[at]]


def check_sampled(
    endpoint: Endpoint,
    prompts: Seq[str],
    num_tokens: int,
    tell: Callable[[str], None] = lambda what: None,
) -> Check:
    """At temperature 1, tokens of each rank are drawn as often as their logprobs say."""
    outputs: list[Output] = []
    for output in _sample(endpoint, prompts, num_tokens):
        outputs.append(output)
        tell(f"{sum(len(o.tokens) for o in outputs)} of {num_tokens} tokens")
    return examine_ranks(outputs)


def _sample(endpoint: Endpoint, prompts: Seq[str], num_tokens: int) -> Iterator[Output]:
    rounds = -(-num_tokens // (SAMPLE_TOKENS * len(prompts)))

    def one(prompt: str) -> Output:
        return endpoint.complete(prompt, max_tokens=SAMPLE_TOKENS, temperature=1.0)[0]

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        yield from pool.map(one, [prompt for _ in range(rounds) for prompt in prompts])


def examine_ranks(outputs: Seq[Output]) -> Check:
    """The chi-squared test of the module's docstring over sampled outputs."""
    hits, dists = _ranks(outputs)
    num_tokens = len(hits)
    expected = dists.sum(0)
    cells = _cells(expected)
    pooled = np.stack([dists[:, first:last].sum(1) for first, last in cells], 1)
    drawn = np.stack([(hits >= first) & (hits < last) for first, last in cells], 1)
    # The last cell follows from the others.
    off = (drawn - pooled).sum(0)[:-1]
    covariance = (np.diag(pooled.sum(0)) - pooled.T @ pooled)[:-1, :-1]
    freedom = len(off)
    statistic = float(off @ np.linalg.pinv(covariance) @ off) if freedom else 0.0
    p_value = tail(statistic, freedom) if freedom else 1.0
    top, dist = float((hits == 0).mean()), float(dists[:, 0].mean())
    spread = sqrt(max(float((dists[:, 0] * (1 - dists[:, 0])).sum()), 1e-12)) / num_tokens
    shows = sqrt(needed(freedom, LEVEL, POWER)) * spread
    passed = p_value >= LEVEL
    return Check(
        "sampled law",
        passed,
        f"{num_tokens} tokens at temperature 1: the most probable one drawn {top:.1%} of the time "
        f"where the logprobs say {dist:.1%}; chi-squared {statistic:.1f} with {freedom} degrees of "
        f"freedom, p = {p_value:.2g}; an error of {shows:.1%} shows with {POWER:.0%} power",
        {
            "num_tokens": num_tokens,
            "statistic": statistic,
            "freedom": freedom,
            "p_value": p_value,
            "level": LEVEL,
            "top_drawn": top,
            "top_law": dist,
            "detects_shift": shows,
        },
        [] if passed else ["the tokens do not have the distribution that the logprobs report"],
    )


def _ranks(outputs: Seq[Output]) -> tuple[Any, Any]:
    """For every token its rank among the TOP (TOP: none of them), and the ranks' distribution."""
    hits, dists = [], []
    for output in outputs:
        for token, top in zip(output.tokens, output.tops, strict=True):
            best = sorted(top.items(), key=lambda item: -item[1])[:TOP]
            dist = [exp(value) for _, value in best]
            dist += [0.0] * (TOP - len(dist))
            dists.append([*dist, max(0.0, 1.0 - sum(dist))])
            names = [name for name, _ in best]
            hits.append(names.index(token) if token in names else TOP)
    if not hits:
        raise EngineError("the endpoint returned no tokens: nothing to examine")
    return np.array(hits), np.array(dists)


def _cells(expected: Any) -> list[tuple[int, int]]:
    """Ranks, pooled from the last until each cell expects enough draws."""
    cells: list[tuple[int, int]] = []
    last = len(expected)
    for first in range(len(expected) - 1, -1, -1):
        if expected[first:last].sum() >= MIN_EXPECTED or first == 0:
            cells.append((first, last))
            last = first
    return cells[::-1]
