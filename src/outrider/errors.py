"""Every exception that Outrider raises for users.

    OutriderError
    ├── ConfigError            an option that cannot work; message says which and what to do
    │   ├── LossyPairing       a proposer/verifier pair that would change the output distribution
    │   └── UnknownName        no such proposer, verifier, ... (with a suggestion)
    ├── ModelError             a folder that cannot be loaded, a model that fails the self-check
    │   ├── NoSuchModel        nothing has this name, here or on the hub
    │   └── VocabularyMismatch target and drafter do not share a vocabulary
    ├── RequestError           a request that cannot be served: empty, too long, bad parameter
    └── EngineError            the engine itself failed; the request was valid
        └── Overloaded         no room for this request now: send it again later

User errors carry a one-line message. On the command line a mistake in the call becomes exit code 2,
a model that does not load exit code 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OutriderError(Exception):
    """Base of the tree: catches everything that Outrider raises on purpose."""

    exit_code = 2  # of the command line


class ConfigError(OutriderError, ValueError):
    """An option, or a combination of options, that cannot work."""


class LossyPairing(ConfigError):
    """A proposer and a verifier that together would change the target's distribution."""


class UnknownName(ConfigError):
    """A name that is not in its registry."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(names)}")


class ModelError(OutriderError):
    """A model folder that cannot be loaded, or a model whose drafts cannot be verified."""

    exit_code = 1


class NoSuchModel(ModelError):
    """A name that no model has, here or on the hub."""

    exit_code = 2


class VocabularyMismatch(ModelError):
    """A token id has different meanings for target and drafter."""

    exit_code = 2


class RequestError(OutriderError, ValueError):
    """A request that cannot be served.

    `param` names the wrong parameter, `code` the kind of error, for programs.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineError(OutriderError, RuntimeError):
    """The engine failed; the request was valid."""


class Overloaded(EngineError):
    """The engine works but has no room for this request now: queue, time or memory."""
