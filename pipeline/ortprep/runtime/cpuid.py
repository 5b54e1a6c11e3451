"""The features of an x86 processor, as the C library passes them on."""

from __future__ import annotations

import ctypes

_LEAF_1, _LEAF_7, _LEAF_7_1 = 0, 1, 6
_EAX, _EBX, _ECX, _EDX = range(4)

CPUID_BITS = {
    "pni": (_LEAF_1, _ECX, 0),
    "ssse3": (_LEAF_1, _ECX, 9),
    "fma": (_LEAF_1, _ECX, 12),
    "sse4_1": (_LEAF_1, _ECX, 19),
    "sse4_2": (_LEAF_1, _ECX, 20),
    "avx": (_LEAF_1, _ECX, 28),
    "f16c": (_LEAF_1, _ECX, 29),
    "avx2": (_LEAF_7, _EBX, 5),
    "avx512f": (_LEAF_7, _EBX, 16),
    "avx512dq": (_LEAF_7, _EBX, 17),
    "avx512cd": (_LEAF_7, _EBX, 28),
    "avx512bw": (_LEAF_7, _EBX, 30),
    "avx512vl": (_LEAF_7, _EBX, 31),
    "avx512vbmi": (_LEAF_7, _ECX, 1),
    "avx512_vnni": (_LEAF_7, _ECX, 11),
    "amx_bf16": (_LEAF_7, _EDX, 22),
    "amx_tile": (_LEAF_7, _EDX, 24),
    "amx_int8": (_LEAF_7, _EDX, 25),
    "avx_vnni": (_LEAF_7_1, _EAX, 4),
    "avx512_bf16": (_LEAF_7_1, _EAX, 5),
}
"""Flags of `/proc/cpuinfo` by (glibc's index of the CPUID leaf, register, bit)."""


def read_cpuid() -> dict[int, tuple[int, ...]] | None:
    """Returns the registers of the leaves that `CPUID_BITS` names, as far as the kernel allows their use.

    `/proc/cpuinfo` describes the host even when this process runs on an emulated processor, and ONNX Runtime
    asks the processor. The C library has its answer since glibc 2.33; None for older ones and other
    processors.
    """
    function = getattr(ctypes.CDLL(None), "__x86_get_cpuid_feature_leaf", None)
    if function is None:
        return None
    function.restype = ctypes.POINTER(ctypes.c_uint32 * 8)
    function.argtypes = [ctypes.c_uint32]
    # Four registers as the processor gave them, then the same four with what the kernel allows to be used.
    return {leaf: tuple(function(leaf).contents)[4:] for leaf in (_LEAF_1, _LEAF_7, _LEAF_7_1)}
