"""Builds the native engine along with the package, if the machine can.

Everything else about the package is in pyproject.toml. Without a C++ compiler the installation
succeeds, says so, and the torch decoder does the same work more slowly.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path(__file__).parent / "src" / "outrider" / "native"


def _native_build() -> ModuleType:
    """outrider.native.build, by path: the package cannot be imported before it is installed."""
    spec = importlib.util.spec_from_file_location("outrider_native_build", NATIVE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    """One shared library with a plain C interface, the same for every version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        build = _native_build()
        try:
            build.compile_library(Path(self.get_ext_fullpath(ext.name)))
        except build.BuildError as error:
            print(
                f"outrider: the native CPU engine was not built ({error}). The torch decoder "
                "will be used instead; install a C++ compiler and reinstall for the fast path.",
                file=sys.stderr,
            )


setup(
    ext_modules=[Extension("outrider.native._outrider", sources=[], optional=True)],
    cmdclass={"build_ext": BuildNative},
)
