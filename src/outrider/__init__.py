"""Exact speculative decoding for every causal language model."""
