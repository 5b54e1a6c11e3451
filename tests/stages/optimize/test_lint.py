"""Laws of the lint: what no machine, or not every machine, may load is found at any depth of a graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from ortprep.runtime.loading.session import build_session, default_plan
from ortprep.stages.optimize.graph_writer import remove_copies, remove_phantom_inputs
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


ON_DEVICE = "_CUDAExecutionProvider"


def add_copies(model: onnx.ModelProto) -> onnx.ModelProto:
    """Does to `two_inputs` what a session on CUDA would: `left` goes up, the sum comes down."""
    add, matmul = model.graph.node
    add.input[0] += ON_DEVICE
    add.output[0] += ON_DEVICE
    nodes = [
        helper.make_node("MemcpyFromHost", ["left"], [f"left{ON_DEVICE}"], name="Memcpy"),
        add,
        helper.make_node("MemcpyToHost", [f"sum{ON_DEVICE}"], ["sum"], name="Memcpy_token_1"),
        matmul,
    ]
    model.graph.ClearField("node")
    model.graph.node.extend(nodes)
    model.graph.value_info.append(models.value(f"sum{ON_DEVICE}", TensorProto.FLOAT, ["batch", 4]))
    return model


def test_a_graph_without_its_copies_is_the_graph_before_them():
    model = add_copies(models.two_inputs())
    assert remove_copies(model) == 2
    assert model == models.two_inputs()


def test_a_graph_without_copies_stays_as_it_is():
    for build in (models.two_inputs, models.conv_net, models.if_net, models.loop_net, models.function_net):
        model = build()
        assert remove_copies(model) == 0
        assert model == build()


def test_a_doubled_weight_is_single_again():
    model = models.two_inputs()
    doubled = model.graph.initializer.add()
    doubled.CopyFrom(model.graph.initializer[0])
    doubled.name = f"w{ON_DEVICE}"
    model.graph.node[1].input[1] = doubled.name
    assert remove_copies(model) == 1
    assert model == models.two_inputs()


def test_copies_within_subgraphs_are_removed_each_in_its_own():
    model = models.if_net()
    for attribute in model.graph.node[-1].attribute:
        (node,) = attribute.g.node
        node.input[0] = f"x{ON_DEVICE}"
        attribute.g.node.insert(0, helper.make_node("MemcpyFromHost", ["x"], [f"x{ON_DEVICE}"]))
    assert remove_copies(model) == 2
    assert model == models.if_net()


def test_a_value_copied_outside_is_known_by_its_own_name_inside_a_subgraph():
    model = models.if_net()
    for attribute in model.graph.node[-1].attribute:
        attribute.g.node[0].input[0] = f"x{ON_DEVICE}"
    model.graph.node.insert(0, helper.make_node("MemcpyFromHost", ["x"], [f"x{ON_DEVICE}"]))
    assert remove_copies(model) == 1
    assert model == models.if_net()


def test_a_copy_under_another_name_is_left_for_the_lint():
    model = models.two_inputs()
    model.graph.node[0].input[0] = "above"
    model.graph.node.insert(0, helper.make_node("MemcpyFromHost", ["left"], ["above"]))
    assert remove_copies(model) == 0


def test_the_repaired_graph_answers_as_before(tmp_path):
    repaired = add_copies(models.two_inputs())
    remove_copies(repaired)
    feeds = {name: np.arange(8, dtype=np.float32).reshape(2, 4) for name in ("left", "right")}
    answers = [
        build_session(default_plan(str(models.write_model(model, tmp_path / name)))).run(None, feeds)[0]
        for name, model in (("repaired.onnx", repaired), ("source.onnx", models.two_inputs()))
    ]
    np.testing.assert_array_equal(*answers)


def test_an_input_nobody_reads_and_the_source_has_not_is_removed():
    model = models.two_inputs()
    model.graph.input.append(models.value("merged_away", TensorProto.FLOAT, [4]))
    assert remove_phantom_inputs(model, ["left", "right"]) == 1
    assert model == models.two_inputs()


def test_inputs_of_the_source_stay_even_if_nobody_reads_them_any_more():
    model = models.two_inputs()
    model.graph.node[0].input[1] = "left"
    assert remove_phantom_inputs(model, ["left", "right"]) == 0
    assert [value.name for value in model.graph.input] == ["left", "right"]


def test_an_input_that_a_subgraph_reads_and_a_listed_initializer_stay():
    model = models.if_net()
    model.graph.input.append(models.value("zero", TensorProto.FLOAT, []))
    assert remove_phantom_inputs(model, []) == 0
