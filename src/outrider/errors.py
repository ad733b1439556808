"""Every exception a user of Outrider can meet.

    OutriderError
    ├── ConfigError            an option that cannot work; message says which and what to do
    │   ├── LossyPairing       a proposer/verifier pair that would change the output's law
    │   └── UnknownName        no such proposer, verifier, ... (with a suggestion)
    ├── ModelError             a folder that cannot be loaded, a model that fails the self-check
    │   └── VocabularyMismatch target and drafter do not share a vocabulary
    ├── RequestError           a request that cannot be served: empty, too long, bad parameter
    └── EngineError            the engine itself failed; the request was not at fault
        └── Overloaded         no room for this request now: it may be sent again later

User errors carry a one-line message and become exit code 2 on the command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OutriderError(Exception):
    """Base of the tree; catch this to catch everything Outrider raises on purpose."""


class ConfigError(OutriderError, ValueError):
    """An option, or a combination of options, that cannot work."""


class LossyPairing(ConfigError):
    """A proposer and a verifier which together would not reproduce the target's law."""


class UnknownName(ConfigError):
    """A name that is not in its registry."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(names)}")


class ModelError(OutriderError):
    """A model folder that cannot be loaded, or a model we refuse to speculate with."""


class VocabularyMismatch(ModelError):
    """Target and drafter disagree about what a token id means."""


class RequestError(OutriderError, ValueError):
    """A request that cannot be served as asked.

    `param` names the wrong parameter, `code` the kind of error, for programs.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineError(OutriderError, RuntimeError):
    """The engine failed; nothing was wrong with the request."""


class Overloaded(EngineError):
    """The engine is well but has no room for this request now: queue, time or memory."""
