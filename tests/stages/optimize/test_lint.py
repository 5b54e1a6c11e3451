from __future__ import annotations

from dataclasses import replace

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from ortprep.stages.optimize.graph_description import (
    ExternalReference,
    GraphDescription,
    NodeDescription,
    describe_graph,
)
from ortprep.stages.optimize.lint import REQUIREMENT, LintContext, errors_of, lint_graph
from tests import builders as models

DATA = "net_optimized.onnx.data"
CLEAN = GraphDescription(
    ir_version=8,
    opsets={"": 17, "ai.onnx.ml": 5},
    nodes=(NodeDescription("relu", "", "Relu"),),
    values=frozenset({"x", "y"}),
    external=(ExternalReference("w", DATA, offset=0, length=4096),),
    inputs=("x",),
    outputs=("y",),
)
AROUND = LintContext(
    variant="cpu",
    data_files=frozenset({DATA}),
    file_sizes={"net_optimized.onnx": 500, DATA: 4096},
    opsets={
        "": 26,
        "ai.onnx.ml": 5,
        "com.microsoft": 1,
        "com.microsoft.nchwc": 1,
        "com.ms.internal.nhwc": 20,
    },
    source_operators=frozenset({"Relu"}),
    inputs=("x",),
    outputs=("y",),
)


def with_nodes(*nodes: NodeDescription) -> GraphDescription:
    return replace(CLEAN, nodes=(*CLEAN.nodes, *nodes))


def with_references(*references: ExternalReference) -> GraphDescription:
    return replace(CLEAN, external=references)


def found(graph: GraphDescription, around: LintContext = AROUND) -> dict[str, str]:
    return {finding.rule: finding.severity for finding in lint_graph(graph, around)}


def found_in(model: onnx.ModelProto, around: LintContext = AROUND) -> dict[str, str]:
    graph = describe_graph(model)
    return found(graph, replace(around, inputs=graph.inputs, outputs=graph.outputs))


@pytest.mark.parametrize("variant", ["cpu", "cuda", "portable"])
def test_a_clean_graph_has_no_finding(variant: str) -> None:
    assert found(CLEAN, replace(AROUND, variant=variant)) == {}


@pytest.mark.parametrize("variant", ["cpu", "cuda", "portable"])
@pytest.mark.parametrize("operator", ["MemcpyFromHost", "MemcpyToHost"])
def test_a_copy_between_devices_is_an_error_on_every_target(variant: str, operator: str) -> None:
    graph = with_nodes(NodeDescription("Memcpy_token_1", "", operator))
    assert found(graph, replace(AROUND, variant=variant)) == {"memcpy-node": "error"}


def test_a_value_named_after_a_provider_is_an_error() -> None:
    graph = replace(CLEAN, values=CLEAN.values | {"mask_CUDAExecutionProvider"})
    assert found(graph) == {"provider-name": "error"}


def test_a_compiled_node_is_an_error() -> None:
    assert found(with_nodes(NodeDescription("engine", "com.microsoft", "EPContext"))) == {
        "compiled-node": "error"
    }


@pytest.mark.parametrize(
    ("variant", "severity"), [("cpu", "requirement"), ("cuda", "requirement"), ("portable", "error")]
)
def test_a_blocked_layout_binds_to_hardware_and_is_never_portable(variant: str, severity: str) -> None:
    findings = found(
        with_nodes(NodeDescription("conv", "com.microsoft.nchwc", "Conv")), replace(AROUND, variant=variant)
    )
    assert findings["nchwc-layout"] == severity


@pytest.mark.parametrize(("variant", "severity"), [("cpu", "error"), ("cuda", "requirement")])
def test_the_internal_layout_is_for_cuda_only(variant: str, severity: str) -> None:
    graph = with_nodes(NodeDescription("conv", "com.ms.internal.nhwc", "Conv"))
    assert found(graph, replace(AROUND, variant=variant)) == {"internal-nhwc": severity}


def test_a_requirement_does_not_forbid_a_graph() -> None:
    findings = lint_graph(with_nodes(NodeDescription("conv", "com.microsoft.nchwc", "Conv")), AROUND)
    assert [finding.severity for finding in findings] == [REQUIREMENT]
    assert errors_of(findings) == ()


def test_an_address_in_memory_is_an_error_and_not_taken_for_a_file() -> None:
    tag = ExternalReference("w", "*/_ORT_MEM_ADDR_/*", offset=140_000_000_000, length=16)
    assert found(with_references(tag)) == {"memory-address": "error"}


@pytest.mark.parametrize("location", ["/etc/passwd", "../weights.bin", "a/../../b", "", "a\\b"])
def test_data_outside_the_folder_is_an_error(location: str) -> None:
    assert "external-outside" in found(with_references(ExternalReference("w", location, 0, 0)))


def test_data_in_the_sources_file_is_an_error() -> None:
    around = replace(AROUND, file_sizes={**AROUND.file_sizes, "weights.bin": 10_000})
    findings = found(with_references(ExternalReference("w", "weights.bin", 0, 16)), around)
    assert findings == {"external-elsewhere": "error"}


def test_data_in_a_file_that_is_not_there_is_an_error() -> None:
    around = replace(AROUND, file_sizes={})
    assert found(CLEAN, around) == {"external-overrun": "error"}


@given(offset=st.integers(0, 2**63), length=st.integers(0, 2**63), size=st.integers(0, 2**40))
def test_a_reference_past_the_end_of_its_file_is_always_found(offset: int, length: int, size: int) -> None:
    graph = with_references(ExternalReference("w", DATA, offset, length))
    findings = found(graph, replace(AROUND, file_sizes={DATA: size}))
    assert ("external-overrun" in findings) == (offset + length > size)


def test_a_domain_the_installed_runtime_lacks_is_an_error() -> None:
    graph = with_nodes(NodeDescription("n", "com.example", "Frob"))
    assert found(graph) == {"unknown-domain": "error"}


def test_a_domain_that_is_imported_and_not_used_is_no_finding() -> None:
    assert found(replace(CLEAN, opsets={**CLEAN.opsets, "org.pytorch.aten": 1})) == {}


def test_a_function_of_the_model_itself_is_no_unknown_operator() -> None:
    graph = replace(
        with_nodes(NodeDescription("call", "local", "ReluPlus")),
        local_functions=frozenset({("local", "ReluPlus")}),
    )
    assert found(graph, replace(AROUND, variant="portable")) == {}


def test_an_opset_the_installed_runtime_lacks_is_an_error() -> None:
    assert found(replace(CLEAN, opsets={"": 27})) == {"unknown-opset": "error"}


@pytest.mark.parametrize(
    ("operators", "expected"),
    [
        (set(), {"not-portable": "error"}),
        ({"com.microsoft.Gelu"}, {"not-portable": "error"}),  # the same domain is not the same operator
        ({"com.microsoft.FastGelu"}, {}),
    ],
)
def test_f11_the_portable_variant_has_no_operator_that_the_source_had_not(
    operators: set[str], expected: dict[str, str]
) -> None:
    graph = with_nodes(
        NodeDescription("gelu", "com.microsoft", "FastGelu"), NodeDescription("tanh", "", "Tanh")
    )
    around = replace(AROUND, variant="portable", source_operators=frozenset({"Relu", *operators}))
    assert found(graph, around) == expected


@pytest.mark.parametrize("inputs", [(), ("x", "w"), ("w",)])
def test_an_input_more_or_less_than_the_source_has_is_an_error(inputs: tuple[str, ...]) -> None:
    assert found(replace(CLEAN, inputs=inputs)) == {"interface": "error"}


def test_outputs_in_another_order_are_an_error() -> None:
    around = replace(AROUND, outputs=("y", "z"))
    assert found(replace(CLEAN, outputs=("y", "z")), around) == {}
    assert found(replace(CLEAN, outputs=("z", "y")), around) == {"interface": "error"}


def test_an_initializer_that_is_listed_as_an_input_is_none() -> None:
    model = models.two_inputs()
    model.graph.input.append(models.value("w", TensorProto.FLOAT, [4, 5]))
    assert describe_graph(model).inputs == ("left", "right")


def test_hazards_are_found_at_any_depth_of_subgraphs() -> None:
    model = models.if_net()
    branch = model.graph.node[-1].attribute[0].g
    branch.node.append(helper.make_node("MemcpyFromHost", ["x"], ["x_CUDAExecutionProvider"], name="copy"))
    models.point_outside(branch.initializer[0], "*/_ORT_MEM_ADDR_/*", offset=4096, length=16)
    assert set(found_in(model)) == {"memcpy-node", "provider-name", "memory-address"}


def test_hazards_are_found_in_functions() -> None:
    model = models.function_net()
    model.functions[0].node[0].op_type = "MemcpyToHost"
    assert "memcpy-node" in found_in(model)


def test_weights_in_attributes_are_looked_at() -> None:
    tensor = TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[4])
    models.point_outside(tensor, "elsewhere.bin", offset=0, length=16)
    node = helper.make_node("Constant", [], ["c"])
    node.attribute.append(helper.make_attribute("value", tensor))
    model = models.build_model([node], inputs=[], outputs=[models.value("c", TensorProto.FLOAT, [4])])
    assert "external-elsewhere" in found_in(model)


@pytest.mark.parametrize("offset", ["-1", "1e3", "x", "9" * 30])
def test_an_offset_that_is_no_number_is_past_every_end(offset: str) -> None:
    model = models.matmul_net()
    models.point_outside(model.graph.initializer[0], DATA)
    model.graph.initializer[0].external_data.add(key="offset", value=offset)
    assert "external-overrun" in found_in(model)


def test_a_reference_without_length_reaches_as_far_as_its_shape() -> None:
    model = models.matmul_net(size=64, layers=1)
    models.point_outside(model.graph.initializer[0], DATA, offset=0)
    short = replace(AROUND, file_sizes={DATA: 64 * 64 * 4 - 1})
    exact = replace(AROUND, file_sizes={DATA: 64 * 64 * 4})
    assert found_in(model, short) == {"external-overrun": "error"}
    assert found_in(model, exact) == {}
