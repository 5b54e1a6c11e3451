"""Laws of the lint: what no machine, or not every machine, may load is found at any depth of a graph."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from ortprep.stages.optimize.lint import REQUIREMENT, LintContext, errors_of, lint_model
from tests import builders as models

DATA = "net_optimized.onnx.data"
CONTEXT = LintContext(variant="cpu", source_operators=("Relu",), inputs=("x",), outputs=("y",))


def net(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """Returns a model `y = Relu(x)`, and what else is given."""
    x, y = (models.value(name, TensorProto.FLOAT, [2, 4]) for name in "xy")
    return models.build_model([helper.make_node("Relu", ["x"], ["y"]), *nodes], inputs=[x], outputs=[y])


def node(operator: str, domain: str = "") -> onnx.NodeProto:
    return helper.make_node(operator, ["x"], ["other"], name="other", domain=domain)


def found(model: onnx.ModelProto, context: LintContext = CONTEXT) -> dict[str, str]:
    findings = lint_model(model, context, data_files={DATA})
    return {finding.rule: finding.severity for finding in findings}


def found_in(model: onnx.ModelProto) -> dict[str, str]:
    """Returns what is found beside the interface."""
    return {rule: severity for rule, severity in found(model).items() if rule != "interface"}


@pytest.mark.parametrize("variant", ["cpu", "cuda", "portable"])
def test_a_clean_graph_has_no_finding(variant):
    assert found(net(), replace(CONTEXT, variant=variant)) == {}


@pytest.mark.parametrize(
    ("operator", "domain", "rule", "variants"),
    [
        ("MemcpyFromHost", "", "memcpy-node", ""),
        ("MemcpyToHost", "", "memcpy-node", ""),
        ("EPContext", "com.microsoft", "compiled-node", ""),
        ("Conv", "com.microsoft.nchwc", "nchwc-layout", "cpu cuda"),
        ("Conv", "com.ms.internal.nhwc", "internal-nhwc", "cuda"),
    ],
)
def test_a_hazardous_node_is_an_error_unless_it_only_binds_the_variant_to_a_machine(
    operator, domain, rule, variants
):
    for variant in ("cpu", "cuda", "portable"):
        findings = found(net(node(operator, domain)), replace(CONTEXT, variant=variant))
        assert findings[rule] == ("requirement" if variant in variants.split() else "error")


def test_a_requirement_does_not_forbid_a_graph():
    findings = lint_model(net(node("Conv", "com.microsoft.nchwc")), CONTEXT, data_files=())
    assert [finding.severity for finding in findings] == [REQUIREMENT]
    assert errors_of(findings) == ()


def test_a_value_named_after_a_provider_is_an_error():
    model = net(helper.make_node("Relu", ["x"], ["mask_CUDAExecutionProvider"]))
    assert found(model) == {"provider-name": "error"}


@given(location=st.sampled_from(["weights.bin", "*/_ORT_MEM_ADDR_/*", "/etc/passwd", "../w", ""]) | st.text())
def test_weights_anywhere_but_in_the_file_that_was_written_are_an_error(location):
    model = net()
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    models.point_outside(tensor, location, offset=0, length=16)
    model.graph.initializer.append(tensor)
    assert found(model) == ({} if location == DATA else {"external-elsewhere": "error"})


@pytest.mark.parametrize(
    ("operators", "expected"),
    [
        (set(), {"not-portable": "error"}),
        ({"com.microsoft.Gelu"}, {"not-portable": "error"}),  # the same domain is not the same operator
        ({"com.microsoft.FastGelu"}, {}),
    ],
)
def test_f11_the_portable_variant_has_no_operator_that_the_source_had_not(operators, expected):
    context = replace(CONTEXT, variant="portable", source_operators=("Relu", *operators))
    assert found(net(node("FastGelu", "com.microsoft"), node("Tanh")), context) == expected


def test_a_function_of_the_model_itself_is_no_operator_beyond_the_sources():
    model = models.function_net()
    context = LintContext("portable", (), ("x",), tuple(value.name for value in model.graph.output))
    assert found(model, context) == {}


@pytest.mark.parametrize("inputs", [(), ("x", "w"), ("w",)])
def test_an_input_more_or_less_than_the_source_has_is_an_error(inputs):
    assert found(net(), replace(CONTEXT, inputs=inputs)) == {"interface": "error"}


def test_outputs_in_another_order_are_an_error():
    model = net(helper.make_node("Relu", ["x"], ["z"]))
    model.graph.output.append(models.value("z", TensorProto.FLOAT, [2, 4]))
    assert found(model, replace(CONTEXT, outputs=("y", "z"))) == {}
    assert found(model, replace(CONTEXT, outputs=("z", "y"))) == {"interface": "error"}


def test_an_initializer_that_is_listed_as_an_input_is_none():
    model = net()
    model.graph.initializer.append(TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[0]))
    model.graph.input.append(models.value("w", TensorProto.FLOAT, [0]))
    assert found(model) == {}


def test_hazards_are_found_at_any_depth_of_subgraphs():
    model = models.if_net()
    branch = model.graph.node[-1].attribute[0].g
    branch.node.append(helper.make_node("MemcpyFromHost", ["x"], ["x_CUDAExecutionProvider"], name="copy"))
    models.point_outside(branch.initializer[0], "*/_ORT_MEM_ADDR_/*", offset=4096, length=16)
    assert set(found_in(model)) == {"memcpy-node", "provider-name", "external-elsewhere"}


def test_hazards_are_found_in_functions():
    model = models.function_net()
    model.functions[0].node[0].op_type = "MemcpyToHost"
    assert "memcpy-node" in found_in(model)


def test_weights_in_attributes_are_looked_at():
    tensor = TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[4])
    models.point_outside(tensor, "elsewhere.bin", offset=0, length=16)
    constant = helper.make_node("Constant", [], ["c"])
    constant.attribute.append(helper.make_attribute("value", tensor))
    assert found(net(constant)) == {"external-elsewhere": "error"}
