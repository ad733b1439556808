"""Tiny drafters with random weights in every published layout, each with its reference.

`CASES` maps a name to the kind of the drafter and to a function that writes its folder and returns
what it should draft. The target is `TARGET`: eight layers of width 32, 64 ids.
"""

from published import dflash, eagle3, eagle_others, state_heads
from published.cases import CASES, TARGET, L, Reference

__all__ = ["CASES", "TARGET", "L", "Reference", "dflash", "eagle3", "eagle_others", "state_heads"]
