"""Drafters in the layouts of other engines."""
