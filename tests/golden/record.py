"""Records the golden files: what no change of the code may alter.

    python -m golden.record [tokens] [bundled] [commands] [json] [http]

Run it from the root with PYTHONPATH=src:tests. Record anew only what changed on purpose, and say
in the commit what and why.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from golden import pairs, snapshots

FOLDER = Path(__file__).parent


def read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def tokens() -> Any:
    """Raises ValueError if the torch decoder and the native kernels differ."""
    from outrider import native

    with tempfile.TemporaryDirectory() as folder:
        family = pairs.write_family(Path(folder))
        found = pairs.record(family, "torch")
        if native.available() and pairs.record(family, "native") != found:
            raise ValueError("native kernels and the torch decoder give different tokens")
    return found


def bundled() -> Any:
    """The same for the models that ship."""
    from outrider import native

    found = pairs.record_bundled("torch")
    if native.available() and pairs.record_bundled("native") != found:
        raise ValueError("native kernels and the torch decoder give different tokens")
    return found


def _served(collect: Callable[[Path, list[str], str], Any]) -> Any:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        pair = snapshots.write_pair(folder)
        with snapshots.server(pair) as url:
            return collect(folder, pair, url)


RECORDERS: dict[str, Callable[[], Any]] = {
    "tokens": tokens,
    "bundled": bundled,
    "commands": snapshots.commands,
    "json": lambda: _served(snapshots.outputs),
    "http": lambda: _served(lambda folder, pair, url: snapshots.http(url)),
}


def main() -> None:
    for name in sys.argv[1:] or RECORDERS:
        write(name, RECORDERS[name]())


def write(name: str, value: Any) -> None:
    text = dumps(value)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def dumps(value: Any, indent: str = "") -> str:
    """JSON with a line for every list and every small object."""
    if isinstance(value, dict) and len(json.dumps(value)) > 80:
        inner = indent + " "
        rows = [f"{inner}{json.dumps(key)}: {dumps(value[key], inner)}" for key in value]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    main()
