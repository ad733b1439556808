"""Appending confirmed tokens to a sequence, and stopping exactly where plain decoding would.

A verdict confirms several tokens at once; EOS, a stop string or the length limit may lie in the
middle of them. Tokens are therefore absorbed one by one, and the first that finishes is the last.
"""

from __future__ import annotations

from outrider.engine.request import Sequence


def absorb(sequence: Sequence, tokens: list[int], max_positions: int) -> list[str]:
    """Appends `tokens` up to the first that finishes the sequence; sets `finish_reason` then.

    Returns the text that each kept token newly confirms: a function of the tokens so far, however
    they were cut into steps. Text is held back while a later token could still change it or
    complete a stop string. A finishing id is kept as a token but has no text; a stop string's own
    characters are never shown.
    """
    pieces: list[str] = []
    for token in tokens:
        sequence.tokens.append(token)
        shown: list[str] = []
        sequence.finish_reason = _absorb_one(sequence, token, max_positions, shown)
        pieces.append("".join(shown))
        if sequence.finish_reason is not None:
            break
    sequence.output_text += pieces
    return pieces


def _absorb_one(
    sequence: Sequence, token: int, max_positions: int, pieces: list[str]
) -> str | None:
    num_output = sequence.num_output_tokens
    # A complete grammar allows only the end, also below min_tokens.
    is_due = num_output > sequence.params.min_tokens or sequence.matcher is not None
    if token in sequence.finish_ids and is_due:
        reason = "length" if _is_cut_short(sequence, token) else "stop"
        return _show(sequence, sequence.text.flush(), pieces, last=True) or reason
    if _show(sequence, sequence.text.add(token), pieces):
        return "stop"
    if num_output >= sequence.params.max_tokens or len(sequence.tokens) >= max_positions:
        return _show(sequence, sequence.text.flush(), pieces, last=True) or "length"
    return None


def _is_cut_short(sequence: Sequence, token: int) -> bool:
    """Whether a grammar that could not go on ended the text, rather than completing it."""
    if sequence.matcher is None or token in sequence.params.stop_ids:
        return False
    return not sequence.matcher.is_complete(sequence.tokens[:-1])


def _show(sequence: Sequence, text: str, pieces: list[str], *, last: bool = False) -> str | None:
    """Passes new text through the stop scanner; "stop" when a stop string ended the sequence."""
    if not sequence.params.stop:
        pieces.append(text)
        return None
    if sequence.num_output_tokens <= sequence.params.min_tokens and not last:
        pieces.append(text)  # too early to stop: such text cannot be part of a stop string
        return None
    shown, stopped_by = sequence.scanner.feed(text)
    pieces.append(shown)
    if stopped_by is not None:
        return "stop"
    if last:
        pieces.append(sequence.scanner.flush())
    return None
