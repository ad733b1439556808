"""Benchmarks: plain decoding in the same run, interleaved repeats, exactness checked."""
