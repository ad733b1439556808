"""Which contenders a benchmark compares: from the names a user writes to the things that run."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.bench.contenders import Contender, Ours, plain
from outrider.bench.synthetic import add_synthetic
from outrider.config import NumDraftTokens
from outrider.control.adaptive import AdaptiveController
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.errors import ConfigError
from outrider.policy.base import Policy

SYNTHETIC = "synthetic"


def read_counts(text: str) -> list[NumDraftTokens]:
    """ "2,4,auto" -> [2, 4, "auto"]; raises ConfigError."""
    found: list[NumDraftTokens] = []
    for word in split(text):
        if word != "auto" and not word.isdigit():
            raise ConfigError(f"numbers of draft tokens are numbers or auto, not {word!r}")
        found.append("auto" if word == "auto" else int(word))
    return found


def read_numbers(text: str, what: str) -> list[float]:
    """ "0.4,1" -> [0.4, 1.0]; raises ConfigError."""
    try:
        return [float(word) for word in split(text)]
    except ValueError:
        raise ConfigError(
            f"{what} must be numbers with commas between them, not {text!r}"
        ) from None


def split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def ours(
    engine: Engine,
    proposers: Sequence[str],
    counts: Sequence[NumDraftTokens],
    verifier: str = "coupled",
) -> list[Contender]:
    """Plain decoding, then every proposer with every K.

    "synthetic:ALPHA" or "synthetic:ALPHA@PROPOSER" accepts with probability ALPHA whatever is
    drafted; with a PROPOSER beneath, at that one's cost.
    """
    contenders: list[Contender] = [plain(engine)]
    for name in proposers:
        real = _synthetic(engine, name) if name.startswith(f"{SYNTHETIC}:") else name
        for count in counts:
            if count == 0:
                continue
            wish = Speculation(proposer=real, num_draft_tokens=count, verifier=verifier)
            contenders.append(Ours(f"{real} K={count}", engine, wish, _controller(engine, count)))
    return contenders


def _controller(engine: Engine, count: NumDraftTokens) -> Policy | None:
    """One that learns from this contender's steps alone; prices start from the same measurement."""
    own = engine.policy
    if count != "auto" or not isinstance(own, AdaptiveController):
        return None
    return AdaptiveController(measure=own.measure, evenly=own.evenly)


def _synthetic(engine: Engine, name: str) -> str:
    alpha, _, beneath = name.partition(":")[2].partition("@")
    [value] = read_numbers(alpha, "a synthetic acceptance") or [0.0]
    return add_synthetic(engine, value, beneath or None)


def needs_outputs(contenders: Sequence[Contender]) -> bool:
    """Whether somebody has to be told the outputs beforehand."""
    return any(
        isinstance(c, Ours) and (c.speculation.proposer or "").startswith(SYNTHETIC)
        for c in contenders
    )
