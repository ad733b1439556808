"""The kernels compute the recorded bits: the same on x86-64 and ARM, today and tomorrow.

`make arm-test` runs the same driver on emulated ARM processors.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import native_bits
from native_models import ISAS, needs_native
from outrider.native import build

pytestmark = needs_native


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        compiler = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("driver")
    return native_bits.compile_driver(folder, build.HERE / build.LIBRARY, compiler)


@pytest.mark.parametrize("isa", ISAS)
def test_recorded_bits(driver: Path, isa: str) -> None:
    found = native_bits.run([str(driver)], isa)
    assert found.isa == isa
    native_bits.compare(found)


def test_other_bits_are_noticed(driver: Path) -> None:
    found = native_bits.run([str(driver)], "portable")
    changed = native_bits.Bits("portable", found.hashes | {"drawn": "0"})
    with pytest.raises(native_bits.DriverError, match="portable: other bits than recorded: drawn"):
        native_bits.compare(changed)
