"""A bundle of every release is kept here, and must load for ever (docs/format.md, F5).

Made by `ortprep prepare` of that release, on CPU, from `tests.builders.conv_net(channels=64, classes=100)`.
"""

from pathlib import Path

import pytest

from ortprep.bundle.loader_config import find_variant, read_loader_config
from ortprep.bundle.manifest import read_manifest
from ortprep.bundle.verification import check_bundle
from ortprep.runtime import load

pytestmark = pytest.mark.runtime

BUNDLES = sorted(path.parent for path in Path(__file__).parent.glob("*/*/manifest.json"))


def release_of(bundle):
    return bundle.parent.name


def test_there_is_one():
    assert BUNDLES


@pytest.mark.parametrize("bundle", BUNDLES, ids=release_of)
def test_a_bundle_of_an_older_release_is_intact_and_answers_as_recorded(bundle):
    check_bundle(bundle)
    assert read_manifest(bundle).pipeline_version == release_of(bundle)
    session = load(bundle, target="portable", digests="full", check="golden")
    assert [node.name for node in session.get_inputs()] == ["image"]


@pytest.mark.parametrize("bundle", BUNDLES, ids=release_of)
def test_f11_a_portable_variant_is_for_any_processor_and_holds_no_node_of_onnxruntimes_own(bundle):
    portable = find_variant(read_loader_config(bundle), "portable")
    needs = portable.requirements
    assert needs.providers == ("CPUExecutionProvider",)
    assert (needs.machine, needs.cpu_features, needs.cpu_features_absent) == (None, (), ())
    # A node's domain as protobuf writes it: field 7, length, text. An import without a node does no harm.
    graph = (bundle / portable.model).read_bytes()
    assert b":\x0dcom.microsoft" not in graph
    assert b":\x13com.microsoft.nchwc" not in graph
