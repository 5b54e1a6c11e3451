"""Laws of a written graph: repairs keep what it computes, and what a load does not show is found."""

import pytest
from onnx import TensorProto, helper

from ortprep.stages.optimize.graph_writer import find_unportable, remove_copies, remove_phantom_inputs
from tests import builders as models


def net(*nodes):
    """Returns a model `y = Relu(x)`, and what else is given."""
    model = models.parse("(float[2, 4] x) => (float[2, 4] y) { y = Relu(x) }")
    model.graph.node.extend(nodes)
    return model


def found(model, operators=()):
    return [line.partition(":")[0] for line in find_unportable(model, operators)]


@pytest.mark.parametrize(
    ("operators", "expected"),
    [
        (set(), ["not portable"]),
        ({"com.microsoft.Gelu"}, ["not portable"]),  # the same domain is not the same operator
        ({"com.microsoft.FastGelu"}, []),
    ],
)
def test_f11_the_portable_variant_has_no_operator_that_the_source_had_not(operators, expected):
    gelu, tanh = (
        helper.make_node(operator, ["x"], [operator], domain=domain)
        for operator, domain in (("FastGelu", "com.microsoft"), ("Tanh", ""))
    )
    assert found(net(gelu, tanh), {"Relu", *operators}) == expected


def test_a_function_of_the_model_itself_is_no_operator_beyond_the_sources():
    model = models.function_net()
    assert found(model) == []
    model.functions[0].node[0].domain = "com.microsoft.nchwc"
    assert found(model) == ["not portable"]


def test_operators_are_found_at_any_depth_of_subgraphs():
    model = models.if_net()
    branch = model.graph.node[-1].attribute[0].g
    branch.node.append(helper.make_node("FastGelu", ["x"], ["gelu"], domain="com.microsoft"))
    assert found(model) == ["not portable"]


ON_DEVICE = "_CUDAExecutionProvider"


def add_copies(model):
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


@pytest.mark.parametrize("inside", [True, False])
def test_copies_within_subgraphs_and_of_values_that_they_read_are_removed(inside):
    model = models.if_net()
    branches = [attribute.g for attribute in model.graph.node[-1].attribute]
    for branch in branches:
        branch.node[0].input[0] = f"x{ON_DEVICE}"
    for graph in branches if inside else [model.graph]:
        graph.node.insert(0, helper.make_node("MemcpyFromHost", ["x"], [f"x{ON_DEVICE}"]))
    assert remove_copies(model) == (2 if inside else 1)
    assert model == models.if_net()


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
