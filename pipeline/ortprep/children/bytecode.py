"""Compiled bytecode of packages: where it is missing, every start compiles numpy and ONNX Runtime again."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from ortprep.quoting import quoted

_FEW = 10
"""A package may lack the bytecode of a file or two, whose compilation takes a few ms."""


@dataclass(frozen=True)
class Bytecode:
    """What an import of ONNX Runtime found compiled.

    Attributes:
        missing: Python files of packages that have no bytecode for the next process.
        packages: The folder of packages that has ONNX Runtime.
    """

    missing: int = 0
    packages: str = ""

    @property
    def problem(self) -> str | None:
        """A sentence on what is missing, None if a next start compiles next to nothing."""
        if self.missing <= _FEW:
            return None
        return (
            f"{self.missing} Python files that ONNX Runtime imports have no compiled bytecode, and this "
            "process could not write it: every start compiles them"
        )

    @property
    def remedy(self) -> str:
        """The command that writes it."""
        return f"python -m compileall -q {quoted(self.packages)}   (uv: pip install --compile-bytecode)"


def read_bytecode(_: None = None) -> Bytecode:
    """Imports ONNX Runtime, and looks for the bytecode of all that is imported beside it; runs in a child.

    Python writes it at the first import, unless `PYTHONDONTWRITEBYTECODE` is set or the folder is read-only.
    """
    import onnxruntime

    packages = f"{Path(onnxruntime.__file__).parents[1]}/"
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    found = {spec.origin: spec.cached for spec in specs if spec is not None and spec.cached is not None}
    missing = sum(file.startswith(packages) and not Path(cached).exists() for file, cached in found.items())
    return Bytecode(missing, packages.rstrip("/"))
