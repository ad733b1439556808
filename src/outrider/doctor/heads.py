"""What a folder with drafting heads holds, whether it fits the target, and what to expect of it."""

from __future__ import annotations

from outrider.contracts import ModelSpec
from outrider.model.bundled import find_folder
from outrider.model.dialects.reading import made_for
from outrider.model.head_kinds import MTP
from outrider.model.heads import Head, load_head
from outrider.model.weights import read_json
from outrider.proposers._heads import check_fit


def describe_head(name: str, kind: str, target: ModelSpec) -> tuple[str, bool]:
    """One line, and whether the head was made for another target than this one, by its name.

    Raises ModelError for a head that cannot be loaded or does not fit.
    """
    folder = find_folder(name)
    if kind == MTP:
        meant = made_for(read_json(folder / "config.json"))
        parts = [f"an MTP layer, reads layer {target.num_layers}"]
    else:
        head = load_head(folder, num_layers=target.num_layers)
        check_fit(head, target, name)
        meant = head.made_for
        parts = [f"{kind} heads that fit", *_parts(head, target)]
    if meant:
        parts.append(f"trained for {meant}")
    return ", ".join(parts), bool(meant) and not _is(meant, target.name)


def _parts(head: Head, target: ModelSpec) -> list[str]:
    taps, last = ", ".join(map(str, head.taps)), target.num_layers
    size = sum(parameter.numel() for parameter in head.parameters())
    few = getattr(head.config, "draft_vocab_size", None)
    parts = [f"{size / 1e6:.1f}M parameters ({size / target.num_parameters:.0%} of the target)"]
    parts.append(f"read layers {taps}" if len(head.taps) > 1 else f"read layer {taps or last}")
    if few is not None and few != target.vocab_size:
        parts.append(f"draft {few} of {target.vocab_size} ids")
    if head.num_draft_tokens is not None:
        parts.append(f"draft {head.num_draft_tokens} tokens a step")
    return parts


def _is(meant: str, name: str) -> bool:
    """Whether two names of a model agree but for the owner and the case."""
    return meant.rstrip("/").split("/")[-1].lower() == name.rstrip("/").split("/")[-1].lower()
