"""Measured costs on disk, so that only the first start on a machine has to measure.

One small JSON file per combination of models and machine, in the user's cache folder. Whatever is
old, damaged or about something else is as good as absent; nothing here ever raises.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from outrider.policy.costs import Costs

FORMAT = 8
MAX_AGE_S = 30 * 24 * 3600.0

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """$OUTRIDER_CACHE/costs; without that variable, outrider's folder in the user's cache."""
    own = os.environ.get("OUTRIDER_CACHE")
    if own:
        return Path(own) / "costs"
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(base) if base else Path.home() / ".cache") / "outrider" / "costs"


def load(identity: Mapping[str, object]) -> Costs | None:
    """What was saved under this identity; None when it is absent, stale or unreadable."""
    try:
        record = json.loads(_path(identity).read_text(encoding="utf-8"))
        if record["format"] != FORMAT or record["identity"] != dict(identity):
            return None
        if not 0 <= time.time() - record["saved_at"] <= MAX_AGE_S:
            return None
        return Costs.from_dict(record["costs"])
    except (OSError, ValueError, TypeError, KeyError, RuntimeError):
        return None


def save(identity: Mapping[str, object], costs: Costs) -> None:
    """Replaces the file in one step: a reader sees the old one or the new one, never a part."""
    record = {
        "format": FORMAT,
        "saved_at": time.time(),
        "identity": dict(identity),
        "costs": costs.to_dict(),
    }
    try:
        path = _path(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except (OSError, RuntimeError) as error:  # a home that cannot be written costs a measurement
        logger.debug("cost tables not saved: %s", error)


def _path(identity: Mapping[str, object]) -> Path:
    name = json.dumps(identity, sort_keys=True).encode()
    return cache_folder() / f"{hashlib.sha256(name).hexdigest()[:24]}.json"
