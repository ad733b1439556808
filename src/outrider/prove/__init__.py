"""Losslessness as something one can run: rational enumeration of every rule, draft and bias."""
