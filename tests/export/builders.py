"""Variants with recorded options, for tests of what becomes of them; no files behind them."""

from hypothesis import strategies as st

from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.loader_config import FileEntry, Requirements, Variant, VersionRange
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.options import NEWEST, known_options

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_LAYOUT", "ORT_ENABLE_ALL")


def make_variant(level="ORT_DISABLE_ALL", *, attributes=None, entries=None, cuda=None):
    """Returns a variant for the CPU, or with `cuda` for that provider with these options."""
    providers = (ProviderRecord(CPU),) if cuda is None else (ProviderRecord(CUDA, cuda), ProviderRecord(CPU))
    return Variant(
        name="v",
        target="cpu" if cuda is None else "cuda",
        model="v/m.onnx",
        files=(FileEntry("v/m.onnx", 1, digest_bytes(b"m")),),
        session_options=SessionOptionsRecord(level, attributes or {}, entries or {}),
        providers=providers,
        requirements=Requirements(VersionRange("1.23"), tuple(one.name for one in providers)),
    )


def _values(option):
    if option.kind == "switch":
        return st.sampled_from(["0", "1"])
    if option.kind == "choice":
        return st.sampled_from(option.values)
    if option.kind == "integer":
        low, high = int(option.minimum or 0), int(option.maximum or 4096)
        step = option.multiple or 1
        return st.integers(low // step, min(high, 2**63 - 1) // step).map(lambda count: str(count * step))
    return st.just("0.5") if option.kind == "number" else st.just("text")


def _attribute(option):
    if option.kind == "switch":
        return st.booleans()
    if option.kind == "integer":
        return st.integers(0, 64)
    return _values(option)


def _chosen(options):
    return st.fixed_dictionaries({}, optional={one.name: _values(one) for one in options})


_ATTRIBUTES = [one for one in known_options("attribute", NEWEST) if one.name != "graph_optimization_level"]

any_variant = st.builds(
    make_variant,
    st.sampled_from(LEVELS),
    attributes=st.fixed_dictionaries({}, optional={one.name: _attribute(one) for one in _ATTRIBUTES}),
    entries=_chosen(known_options("session", NEWEST)),
    cuda=st.none() | _chosen(known_options(CUDA, NEWEST)),
)
"""Variants with any of the options that ONNX Runtime knows."""
