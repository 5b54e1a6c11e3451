"""ONNX Runtime's own reader of model packages, through its C interface, which its Python does not have.

`python -m tests.export.package_api PACKAGE ANSWER` opens a package, chooses a variant of every component and
makes its session with what the package says; what it found is written as JSON. A process of its own: a wrong
pointer ends no test run. Positions in the tables are part of ONNX Runtime's stable interface; the newest used
here came with 1.31, before which there is nothing to call.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

API_VERSION = 31
_CREATE_ENV, _GET_MESSAGE, _CREATE_OPTIONS, _PACKAGE_API = 3, 2, 10, 427
_OPTIONS, _OPEN, _COMPONENTS, _VARIANTS, _SELECT, _SELECTED, _FOLDER, _SESSION = 0, 2, 6, 8, 11, 13, 14, 15
_WARNING = 2

Pointer = ctypes.c_void_p


class _Base(ctypes.Structure):
    _fields_ = (("get_api", ctypes.CFUNCTYPE(Pointer, ctypes.c_uint32)),)


class OrtError(Exception):
    """What ONNX Runtime refused, in its own words."""


class Reader:
    """The part of ONNX Runtime's C interface that reads packages."""

    def __init__(self) -> None:
        import onnxruntime

        folder = Path(onnxruntime.__file__).parent / "capi"
        self._library = ctypes.CDLL(str(next(folder.glob("libonnxruntime.so.*"))))
        self._library.OrtGetApiBase.restype = ctypes.POINTER(_Base)
        api = self._library.OrtGetApiBase().contents.get_api(API_VERSION)
        self._api = (Pointer * (_PACKAGE_API + 1)).from_address(api)
        table = self._function(self._api, _PACKAGE_API, Pointer)()
        self._package = (Pointer * (_SESSION + 1)).from_address(table)
        self._env = self._made(self._api, _CREATE_ENV, ctypes.c_int(_WARNING), b"test")

    def open(self, root: Path) -> Pointer:
        return self._made(self._package, _OPEN, str(root).encode())

    def components(self, package: Pointer) -> list[str]:
        return self._names(_COMPONENTS, package)

    def variants(self, package: Pointer, component: str) -> list[str]:
        return self._names(_VARIANTS, package, component.encode())

    def select(self, package: Pointer, component: str) -> Pointer:
        """Chooses a variant for the CPU provider, as a caller who appended it."""
        options = self._made(self._api, _CREATE_OPTIONS)
        append = self._library.OrtSessionOptionsAppendExecutionProvider_CPU
        append.restype, append.argtypes = Pointer, (Pointer, ctypes.c_int)
        self._check(append(options, 1))
        intent = self._made(self._package, _OPTIONS, self._env, options)
        return self._made(self._package, _SELECT, package, component.encode(), intent)

    def describe(self, selected: Pointer) -> dict[str, str]:
        found = {}
        for key, position in (("variant", _SELECTED), ("folder", _FOLDER)):
            text = ctypes.c_char_p()
            self._call(self._package, position, selected, ctypes.byref(text))
            found[key] = (text.value or b"").decode()
        return found

    def make_session(self, selected: Pointer) -> None:
        self._made(self._package, _SESSION, self._env, selected, None)

    def _names(self, position: int, *arguments: Any) -> list[str]:
        names, count = ctypes.POINTER(ctypes.c_char_p)(), ctypes.c_size_t()
        self._call(self._package, position, *arguments, ctypes.byref(names), ctypes.byref(count))
        return [(names[index] or b"").decode() for index in range(count.value)]

    def _made(self, table: Any, position: int, *arguments: Any) -> Pointer:
        made = Pointer()
        self._call(table, position, *arguments, ctypes.byref(made))
        return made

    def _call(self, table: Any, position: int, *arguments: Any) -> None:
        kinds = [ctypes.c_char_p if isinstance(one, bytes) else _kind(one) for one in arguments]
        self._check(self._function(table, position, Pointer, *kinds)(*arguments))

    def _check(self, status: int | None) -> None:
        if status:
            raise OrtError(self._function(self._api, _GET_MESSAGE, ctypes.c_char_p, Pointer)(status).decode())

    @staticmethod
    def _function(table: Any, position: int, result: Any, *arguments: Any) -> Callable[..., Any]:
        return ctypes.CFUNCTYPE(result, *arguments)(table[position])


def _kind(argument: Any) -> Any:
    return ctypes.c_int if isinstance(argument, ctypes.c_int) else Pointer


def read(root: Path) -> dict[str, Any]:
    reader = Reader()
    package = reader.open(root)
    found = {}
    for component in reader.components(package):
        selected = reader.select(package, component)
        reader.make_session(selected)
        found[component] = {
            "variants": reader.variants(package, component),
            **reader.describe(selected),
        }
    return found


def main() -> None:
    try:
        answer: dict[str, Any] = {"components": read(Path(sys.argv[1]))}
    except OrtError as error:
        answer = {"error": str(error)}
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
