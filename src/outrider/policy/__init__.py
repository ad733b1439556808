"""How many tokens to draft: costs, acceptance, and the controller that chooses K.

costs        what a pass and a draft take on this machine
acceptance   how many drafted tokens the target accepts
confidence   the same for drafters that stop by their own confidence
allocation   the speed of one step for any numbers of drafts, and the best ones
controller   decides before a step, learns after it
"""

from __future__ import annotations

MAX_AUTO_DRAFT_TOKENS = 16  # the most that "auto" drafts for one sequence in one step
MEMORY = 0.99  # per draft or step: what is learnt over all requests remembers about 100
VALID_STEPS = 16  # of a decision: one call of an executor. The unit of all that lasts some steps
