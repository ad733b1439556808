"""Builds the native engine with the package. All else about the package is in pyproject.toml.

$OUTRIDER_NATIVE chooses what happens without a C++ compiler:

    auto     (default) a note; the torch decoder does the same work more slowly
    require  an error
    off      no native engine, and a wheel for every platform

$OUTRIDER_BUNDLED=off leaves the bundled models out: 1 MB instead of 88.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

NATIVE = Path(__file__).parent / "src" / "outrider" / "native"
CHOICE = os.environ.get("OUTRIDER_NATIVE", "auto")
BUNDLED = os.environ.get("OUTRIDER_BUNDLED", "on")
if CHOICE not in ("auto", "require", "off"):
    sys.exit(f"OUTRIDER_NATIVE={CHOICE}: use auto, require or off")
if BUNDLED not in ("on", "off"):
    sys.exit(f"OUTRIDER_BUNDLED={BUNDLED}: use on or off")


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
            if CHOICE == "require":
                sys.exit(f"outrider: the native CPU engine was not built: {error}")
            print(
                f"outrider: the native CPU engine was not built ({error}). The torch decoder "
                "will be used instead; install a C++ compiler and reinstall for the fast path.",
                file=sys.stderr,
            )


class BuildPython(build_py):
    def find_data_files(self, package: str, src_dir: str) -> list[str]:
        found: list[str] = super().find_data_files(package, src_dir)
        return found if BUNDLED == "on" else [path for path in found if not _is_bundled(path)]


def _is_bundled(path: str) -> bool:
    return NATIVE.parent / "bundled" in Path(path).absolute().parents


class Wheel(bdist_wheel):
    """Tags the wheel for its platform only: the library does not use Python's C interface."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    ext_modules=[]
    if CHOICE == "off"
    else [Extension("outrider.native._outrider", sources=[], optional=CHOICE == "auto")],
    cmdclass={"build_py": BuildPython, "build_ext": BuildNative, "bdist_wheel": Wheel},
)
