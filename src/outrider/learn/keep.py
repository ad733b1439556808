"""Learnt heads on disk: numbered folders in the published layout, the highest number is in use.

A folder is written under another name and renamed when it is complete, and older ones are removed
after that. So whenever a process is killed, the folder has a complete head, or none.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path

from outrider.errors import ConfigError
from outrider.learn.lesson import Weights
from outrider.model.heads import Eagle3Head, load_head

NUM_KEPT = 2
MOST_FOLDERS = 64  # on disk: clients choose salts, and each is a scope
STARTED_FROM = "started-from.json"


def fingerprint(head: Eagle3Head) -> str:
    """Of the head that learning starts from."""
    digest = hashlib.sha256()
    for name, value in sorted(head.state_dict().items()):
        digest.update(name.encode() + value.cpu().numpy().tobytes())
    return digest.hexdigest()


class Kept:
    """The learnt heads of one server. `scope`: "" for all clients, or the digest of a key."""

    def __init__(self, folder: Path, head: Eagle3Head) -> None:
        """Raises ConfigError if the folder was learnt from another head or cannot be used."""
        self.folder, self._head = folder, copy.deepcopy(head)
        found = fingerprint(head)
        try:
            learnt_from = _started_from(folder, found)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot keep learnt heads in {folder}: {error}") from error
        if learnt_from != found:
            raise ConfigError(
                f"{folder} holds heads learnt from another head: give another --learn-folder, or "
                "the --draft-model it began with"
            )

    def scopes(self) -> list[str]:
        """The scopes with a head, the one saved last first."""
        found = [(path, numbers(path)) for path in self.folder.glob("of-*")]
        there = [path for path, several in found if several]
        there.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        return [path.name.removeprefix("of-") for path in there]

    def load(self, scope: str) -> Weights | None:
        """The weights in use when they were last saved; None: there are none."""
        folder = self._folder(scope)
        for number in reversed(numbers(folder)):
            weights: Weights = load_head(folder / str(number)).state_dict()
            return weights
        return None

    def save(self, scope: str, weights: Weights) -> Path:
        folder = self._folder(scope)
        there = numbers(folder)
        path = folder / str(max(there, default=0) + 1)
        self._head.load_state_dict(weights)
        self._head.save(path)
        for number in there[: len(there) + 1 - NUM_KEPT]:
            shutil.rmtree(folder / str(number))
        for other in self.scopes()[MOST_FOLDERS:]:
            shutil.rmtree(self._folder(other))
        return path

    def _folder(self, scope: str) -> Path:
        return self.folder / f"of-{scope}"


def _started_from(folder: Path, fingerprint: str) -> str:
    """Of the head that the folder began with; an empty one begins with this one."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / STARTED_FROM
    if not record.exists():
        partial = record.with_suffix(".partial")
        partial.write_text(json.dumps({"sha256": fingerprint}) + "\n")
        partial.replace(record)
    return str(json.loads(record.read_text()).get("sha256"))


def numbers(folder: Path) -> list[int]:
    """Of the complete heads in a scope's folder, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
