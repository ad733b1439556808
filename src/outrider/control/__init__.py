"""How many tokens to draft: a number that the user gives, or the controller's choice per step."""

from __future__ import annotations

MAX_AUTO_DRAFT_TOKENS = 16  # the most that "auto" drafts for one sequence in one step
