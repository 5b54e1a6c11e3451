"""How far each quantised node is off by itself: what a search for nodes to keep in float32 goes by.

`onnxruntime.quantization.qdq_loss_debug` holds the values of two models in memory, 1.2 GB for one page of
PP-OCRv6's detector, and what it says of a node includes the errors of all nodes before. Here one session
runs the source and, beside each quantised node, its copy on the same inputs, and only sums leave it: no more
memory than calibration takes. For child processes.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import onnx
import onnxruntime
from onnx import NodeProto, TensorProto, helper
from onnxruntime.quantization.quant_utils import DEQUANT_OP_NAME, QUANT_OP_NAME

from ortprep.runtime.loading.session import CPU
from ortprep.runtime.tensors.arrays import read_tensors
from ortprep.stages.convert.weights import move_weights


def measure_errors(source: Path, written: Path, names: Sequence[str], sample: Path) -> dict[str, float]:
    """Returns noise to signal of what each quantised node gives, in amplitude; infinity for no number.

    Args:
        source: The model that was quantised; files are written beside it.
        written: What static quantisation made of it.
        names: Names of the quantised nodes.
        sample: `.npz` of arrays by input name.
    """
    model, copies = onnx.load(source, load_external_data=False), _Copies(onnx.load(written).graph)
    graph, nodes, compared = model.graph, list[NodeProto](), set(names)
    for node in graph.node:
        nodes += (node, *(copies.compare(node) if node.name in compared else ()))
    known, read = (
        {tensor.name for tensor in graph.initializer},
        {name for node in nodes for name in node.input},
    )
    sums = [f"{name}:{kind}" for name in names for kind in ("noise", "signal")]
    del graph.node[:], graph.output[:]
    graph.node.extend(nodes)
    graph.initializer.extend(copies.tensors[name] for name in copies.tensors.keys() & read - known)
    graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in sums)
    beside, options = source.with_name("beside.onnx"), onnxruntime.SessionOptions()
    move_weights(model, source.parent, beside)
    onnx.save(model, beside)

    options.log_severity_level = 3  # errors only
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # As the file has them: no value waits at the end for the copies that read it.
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    session = onnxruntime.InferenceSession(beside, options, providers=[CPU])
    values = [float(value) for value in session.run(sums, read_tensors(sample))]
    return {
        name: math.sqrt(noise / signal) if math.isfinite(noise + signal) and signal else noise and math.inf
        for name, noise, signal in zip(names, values[::2], values[1::2], strict=True)
    }


class _Copies:
    """Copies of quantised nodes that read the source's values; they need some of `tensors`."""

    def __init__(self, written: onnx.GraphProto) -> None:
        self.tensors = {tensor.name: tensor for tensor in written.initializer}
        self._nodes = {node.name: node for node in written.node}
        self._makers = {name: node for node in written.node for name in node.output}
        restorers = [node for node in written.node if node.op_type == DEQUANT_OP_NAME]
        makers = [(self._makers.get(node.input[0]), node.output[0]) for node in restorers]
        self._rounded = {maker.input[0]: output for maker, output in makers if maker is not None}

    def compare(self, node: NodeProto) -> Iterator[NodeProto]:
        """Yields a node's copy, and what gives the sums `NAME:noise` and `NAME:signal` of their outputs."""
        copy, exact, name = NodeProto(), node.output[0], node.name
        copy.CopyFrom(self._nodes[name])
        written, copy.name = copy.output[0], f"{name}:copy"
        copy.output[:] = [f"{name}:copy{number or ''}" for number in range(len(copy.output))]
        for index, value in enumerate(copy.input):
            copy.input[index] = yield from self._round(value, node.input[index], f"{name}:input {index}")
        yield copy
        result = yield from self._round(self._rounded.get(written, ""), copy.name, f"{name}:rounded")
        yield helper.make_node("Sub", [result, exact], [f"{name}:difference"])
        for value, kind in ((f"{name}:difference", "noise"), (exact, "signal")):
            yield helper.make_node("ReduceSumSquare", [value], [f"{name}:{kind}"], keepdims=0)

    def _round(self, value: str, exact: str, name: str) -> Generator[NodeProto, None, str]:
        """Yields copies of the pair that makes a value of the quantised model, and returns what they make."""
        maker, copy = self._makers.get(value), NodeProto()
        if maker is None or maker.op_type not in (QUANT_OP_NAME, DEQUANT_OP_NAME):
            return value if value in self.tensors else exact
        copy.CopyFrom(maker)
        copy.input[0] = yield from self._round(maker.input[0], exact, f"{name}:integers")
        copy.name = copy.output[0] = name
        yield copy
        return name
