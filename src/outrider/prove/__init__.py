"""Executable proofs of exactness: enumeration of every rule, kind of draft and known mistake."""
