"""What tools read of where a bundle is from: each against what the tools' makers publish."""

from __future__ import annotations

import json

import pytest

from ortprep.bundle.digest import digest_bytes
from ortprep.errors import IntegrityError
from ortprep.registry.cache import Cache
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.documents import PROVENANCE, parse_part
from ortprep.registry.part_bundle import read_part_bundle
from ortprep.registry.provenance import check_provenance
from ortprep.registry.publish import publish
from ortprep.registry.pull import PullRequest, pull
from ortprep.registry.receipt import verify_bundle
from ortprep.registry.references import VersionRef
from ortprep.registry.signatures import PART_FILE
from tests.registry.builders import BARE, HERE, Build, Made, write_bundle, write_keys


@pytest.fixture
def pulled(tmp_path):
    """A bundle that was published with a signature and pulled."""
    private, public = write_keys(tmp_path / "keys")
    bundle = write_bundle(tmp_path / "bundle", Build((Made("cpu", HERE), Made("portable"))))
    with open_catalogue(str(tmp_path / "registry"), cache=Cache(tmp_path / "c")) as catalogue:
        publish(bundle, catalogue, private_key=private)
        pull(PullRequest(VersionRef("net", None)), catalogue, tmp_path / "out", hardware=BARE)
    verify_bundle(tmp_path / "out", public)
    return tmp_path / "out"


def test_the_statement_is_slsa_provenance_of_every_file(pulled):
    from google.protobuf.json_format import Parse  # type: ignore[import-untyped]
    from in_toto_attestation.v1.statement import Statement
    from in_toto_attestation.v1.statement_pb2 import Statement as Message

    text = (pulled / PROVENANCE).read_bytes()
    message = Parse(text, Message())
    subjects = [subject for subject in message.subject]  # noqa: C416 - of protobuf
    Statement(subjects, message.predicate_type, message.predicate).validate()
    assert message.predicate_type == "https://slsa.dev/provenance/v1"
    files = {path for path in pulled.rglob("*") if path.is_file() and ".registry" not in path.parts}
    assert {(one.name, one.digest["sha256"]) for one in subjects} == {
        (path.relative_to(pulled).as_posix(), digest_bytes(path.read_bytes())[7:]) for path in files
    }


def test_the_provenance_is_of_the_published_form(pulled):
    """The fields that SLSA 1.0 requires, by its protobuf definition."""
    from google.protobuf.json_format import ParseDict
    from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance as Message

    predicate = json.loads((pulled / PROVENANCE).read_bytes())["predicate"]
    message = ParseDict(predicate, Message())  # refuses what the definition does not have
    assert message.build_definition.build_type == "urn:ortprep:prepare:v1"
    assert message.run_details.builder.id == "urn:ortprep:prepare"
    assert message.run_details.metadata.finished_on.seconds > 0
    (source,) = predicate["buildDefinition"]["resolvedDependencies"]
    assert source["digest"] == {"sha256": digest_bytes(b"source")[7:]}
    assert predicate["buildDefinition"]["externalParameters"]["spec"] == digest_bytes(b"spec")
    assert predicate["buildDefinition"]["internalParameters"]["environment"] == {"onnxruntime": "1.31.1"}


def test_the_same_bundle_has_the_same_documents(tmp_path):
    bundle = write_bundle(tmp_path / "bundle")
    assert read_part_bundle(bundle).provenance == read_part_bundle(bundle).provenance


@pytest.mark.attack
def test_a_statement_with_names_of_mixed_types_is_of_something_else(pulled):
    part = parse_part((pulled / PART_FILE).read_bytes())
    statement = json.loads((pulled / PROVENANCE).read_bytes())
    statement["subject"] += [{"name": name, "digest": {"sha256": "0"}} for name in (7, None, "x")]
    (pulled / PROVENANCE).unlink()
    (pulled / PROVENANCE).write_text(json.dumps(statement))
    with pytest.raises(IntegrityError, match="provenance of something else"):
        check_provenance(pulled, part)


def test_one_changed_byte_of_the_statement_is_noticed(pulled, tmp_path):
    data = (pulled / PROVENANCE).read_bytes()
    (pulled / PROVENANCE).unlink()
    (pulled / PROVENANCE).write_bytes(data.replace(b"net", b"nit", 1))
    with pytest.raises(IntegrityError, match="not as it was written"):
        verify_bundle(pulled, tmp_path / "keys/key.pub")
