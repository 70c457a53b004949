"""Builds the CPU kernels' library beside kernels/cpu_library.py; all else about the package is in pyproject.toml.

It is a plain shared library without Python or torch in it, loaded through ctypes. Each instruction set is a file of
its own with its own flags, chosen at run time. Where it can't be built, the package installs without it and computes by
torch.
"""

import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("kernels/cpu")
# Contracted multiply-adds would make bits depend on how the compiler laid out a loop. The uninitialised variables are
# GCC's own, in its AVX-512 header.
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden"]
FLAGS += ["-fPIC", "-fno-exceptions", "-fno-rtti", "-g0", "-pthread"]
QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi"]
ISA_FLAGS = {
    "kernels_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "kernels_avx512": ["-mavx2", "-mfma", "-mf16c", *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni"))],
    "copies_pclmul": ["-msse4.2", "-mpclmul"],
    "copies_vpclmul": ["-msse4.2", "-mpclmul", "-mavx512f", "-mvpclmulqdq"],
}
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


class BuildLibrary(build_ext):
    """Compiles each source with the flags of its instruction set, in parallel, and links them."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        if sys.platform == "win32":
            raise CompileError("the CPU kernels are written for GCC and Clang")

        def compile_one(source: str) -> list[str]:
            flags = ISA_FLAGS.get(Path(source).stem, []) if IS_X86 else []
            options = [*FLAGS, *QUIET, *flags]
            objects: list[str] = self.compiler.compile([source], self.build_temp, extra_postargs=options)
            return objects

        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor() as executor:
            objects = [item for result in executor.map(compile_one, ext.sources) for item in result]
        # Linked beside the target and moved over it: a process that has the old library mapped keeps it.
        linked = target.with_suffix(".new")
        self.compiler.link_shared_object(objects, str(linked), extra_postargs=["-pthread"])
        shutil.move(linked, target)


sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
depends = sorted(str(path) for path in SOURCES.glob("*.h"))
library = Extension("pageferry.kernels._cpu", sources, depends=depends, language="c++", optional=True)
setup(ext_modules=[library], cmdclass={"build_ext": BuildLibrary})
