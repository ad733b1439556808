"""How many tokens to draft: a number of the user's, or the controller's choice at every step.

Nothing is imported here: the command line shows the default before anything heavy is loaded.
"""

from __future__ import annotations

from typing import Literal

NumDraftTokens = int | Literal["auto"]

DEFAULT_NUM_DRAFT_TOKENS: NumDraftTokens = "auto"
MAX_AUTO_DRAFT_TOKENS = 16  # the most that "auto" drafts for one sequence in one step
