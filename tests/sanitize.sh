#!/usr/bin/env bash
# The native engine's own tests under AddressSanitizer and UndefinedBehaviorSanitizer.
# Takes a few minutes; extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
export PYTHONPATH=src
library=src/outrider/native/_outrider_sanitized.so
"$python" src/outrider/native/build.py --sanitize --output "$library"
asan=$("${CXX:-c++}" -print-file-name=libasan.so)
ubsan=$("${CXX:-c++}" -print-file-name=libubsan.so)
# Python itself leaks on exit, and torch is not instrumented.
export ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 UBSAN_OPTIONS=print_stacktrace=1
OUTRIDER_NATIVE_LIBRARY="$library" LD_PRELOAD="$asan:$ubsan" \
    exec "$python" -m pytest tests/unit/native tests/property/test_native_layout.py tests/property/test_suffix.py \
    tests/property/test_lookup.py \
    tests/unit/proposers/test_heads.py tests/unit/proposers/test_draft_tree.py \
    tests/executors/test_native.py "$@"
