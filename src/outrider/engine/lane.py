"""What the measuring commands share of the engine."""

from __future__ import annotations

from secrets import token_hex


def fresh_salt() -> str:
    """A salt that no request had before.

    A measurement decodes the same prompts again and again. Under one salt a proposer would draft
    from the outputs of earlier rounds, and the prefix cache would skip their prompts.
    """
    return token_hex(8)
