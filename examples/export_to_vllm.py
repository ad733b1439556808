"""Writes a head in the layout that vLLM loads, and prints the command that serves it.

python examples/export_to_vllm.py [bundled:eagle3] [--out eagle3-for-vllm]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from outrider.export.vllm import export_vllm
from outrider.model.bundled import find_folder


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head", nargs="?", default="bundled:eagle3")
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--out", default="eagle3-for-vllm")
    chosen = parser.parse_args(arguments)

    config = export_vllm(find_folder(chosen.head), find_folder(chosen.target), Path(chosen.out))
    print("vllm serve TARGET --speculative-config", repr(json.dumps(config)))


if __name__ == "__main__":
    main()
