"""The script of a measured process: up to its session it does what a job's script does, and nothing else.

It is run as a file, and nobody imports it. What it imports itself is built into the interpreter, so that the
imports of what is measured are its own; what measures is imported after the session.
"""

import marshal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` itself is not built in
    from typing import Any

    import onnxruntime


def start(request: "dict[str, Any]") -> "dict[str, Any]":
    """Makes the session, and returns it with when its import and its initialisation were over.

    What goes wrong is returned too, and raised where time does not count.
    """
    began_s = time.monotonic()
    try:
        # Before `load`, which would import it: so both ways have the same start.
        import onnxruntime

        imported_s = time.monotonic()
        if request["forked"]:
            from ortprep.runtime import load_before_fork

            session = load_before_fork(request["bundle"])
        elif request["bundle"] is not None:
            from ortprep.runtime import load

            session = load(request["bundle"])
        else:
            session = _make_session(onnxruntime, request["plan"])
    except Exception as error:  # noqa: BLE001  raised again by what measures
        return {"error": error}
    return {"session": session, "times_s": (began_s, imported_s, time.monotonic())}


def _make_session(onnxruntime: "Any", plan: "dict[str, Any]") -> "onnxruntime.InferenceSession":
    """Makes a session of a plan in JSON types, without the checks of `build_session`."""
    record, options = plan["session_options"], onnxruntime.SessionOptions()
    level = record["graph_optimization_level"]
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    for name, value in record["attributes"].items():
        members = getattr(type(getattr(options, name)), "__members__", None)
        setattr(options, name, value if members is None else members[value])
    for key, entry in record["config_entries"].items():
        options.add_session_config_entry(key, entry)
    providers = [(provider["name"], provider["options"]) for provider in plan["providers"]]
    if any(name == "CUDAExecutionProvider" for name, _ in providers):
        onnxruntime.preload_dlls()
    return onnxruntime.InferenceSession(plan["model"], options, providers=providers)


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:  # noqa: PTH123  `pathlib` is not built in
        job = marshal.load(file)
    sys.path[:] = job["path"]
    job["request"].update(start(job["request"]))

    from ortprep.children.child import main

    main(job, sys.argv[2])
