"""Compiles the CPU kernels into a wheel, so that its users need no compiler.

A wheel for Linux (x86-64, aarch64) or macOS (arm64) gets one library for each of its machine's
levels in `targets/cpu/prebuilt.py` that the compiler knows. Elsewhere, without a compiler, and in
editable installs the wheel has the sources only, and the kernels are compiled when they are used
for the first time.
"""

from __future__ import annotations

import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

INSIDE = "outpace/targets/cpu"


class PrebuiltKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled kernels to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and tells the builder what to include."""
        kernels = runpy.run_path(str(Path(self.root, "src", INSIDE, "prebuilt.py")))
        levels = kernels["levels_of"](sys.platform, platform.machine())
        if version == "editable" or not levels:
            return
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        if shutil.which(compiler[0]) is None:
            self.app.display_warning(f"no compiled kernels in the wheel: {compiler[0]} is missing")
            return
        self._folder = tempfile.mkdtemp(prefix="outpace-")
        tuned = ("-mtune=generic",) if platform.machine() == "x86_64" else ()
        compiled = False
        for level, (flags, _) in levels.items():
            name = kernels["file_name"](level)
            made = str(Path(self._folder, name))
            target = (*flags, *tuned, str(kernels["SOURCE"]), "-o", made)
            ran = subprocess.run([*compiler, *kernels["FLAGS"], *target])
            if ran.returncode:  # an old compiler does not know the newest processors
                self.app.display_warning(f"no compiled kernels for {level}: {compiler[0]} failed")
                continue
            build_data["force_include"][made] = f"{INSIDE}/{name}"
            compiled = True
        if not compiled:
            return
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{system}"  # the kernels know nothing of Python

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what was compiled."""
        if folder := getattr(self, "_folder", None):
            shutil.rmtree(folder, ignore_errors=True)
