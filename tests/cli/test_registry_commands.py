"""The commands around registries, as a user runs them, and what jobs then load."""

import json
import os
import platform

import numpy as np
import pytest

from ortprep.errors import MissingExtraError
from ortprep.runtime import PoolConfig, SessionPool, load, locate
from ortprep.transport import transfer
from ortprep.versions import install_command
from tests.builders import conv_net
from tests.prepare.builders import AS_PREPARED, REPOSITORY, Project, is_intact
from tests.registry.builders import Build, Made, read_tree, write_bundle
from tests.runtime.builders import CPU_ONLY, CUDA_NEEDED, assert_answers, sample, weights_of
from tests.runtime.builders import write_bundle as write_linear_bundle

SECRET = "hunter2-is-no-password"


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.fixture
def registry(project, monkeypatch):
    """A folder as registry, which commands and jobs find by the environment."""
    folder = project.root / "registry"
    monkeypatch.setenv("ORTPREP_REGISTRY", str(folder))
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(project.root / "cache"))
    return folder


def test_a_model_goes_from_a_folder_to_sessions_and_pools_by_way_of_a_registry(project, registry):
    bundle = write_linear_bundle(
        project.artifacts / "linear", requirements={"cuda": CUDA_NEEDED, "cpu": CPU_ONLY}
    )
    published = project.call("publish", "linear", "--label", "1.0")
    assert published.code == 0, published.err
    assert published.out.startswith("linear@sha256:")
    assert "linear@1.0" in published.err
    assert "MB uploaded\n" in published.err
    assert project.call("promote", "linear@1.0", "production").code == 5, "it was never verified"
    promoted = project.call("promote", "linear@1.0", "production", "--force")
    assert promoted.code == 0, promoted.err
    pulled = project.call("pull", "linear@production", "--out", "pulled")
    assert pulled.code == 0, pulled.err
    assert read_tree(project.root / "pulled") == read_tree(bundle)
    assert is_intact(project.root / "pulled")
    for place in (project.root / "pulled", "registry://linear@production", f"file://{registry}/linear@1.0"):
        assert_answers(load(place))
    with SessionPool("registry://linear@production", PoolConfig(devices=["cpu"])) as pool:
        np.testing.assert_allclose(pool.run({"x": sample()})["y"], sample() @ weights_of(0), rtol=1e-5)
    assert locate("registry://linear@production") != bundle


@pytest.mark.slow
def test_listings_are_tables_or_json(project, registry):
    for i in range(2):
        build = Build((Made("portable", weights=bytes([i])),), spec=bytes([i]))
        write_bundle(project.artifacts / f"net{i}", build)
        assert project.call("publish", f"net{i}", "--label", f"v{i}").code == 0
        assert project.call("promote", f"net@v{i}", "production").code == 0
    listed = project.call("list")
    assert "production → v1" in listed.out
    (model,) = json.loads(project.call("list", "--json").out)
    assert (model["model"], model["versions"]) == ("net", 2)
    versions = project.call("versions", "net")
    state = json.loads(project.call("versions", "net", "--json").out)
    assert state["latest"] == state["labels"]["v1"]
    named = next(line.split()[0] for line in versions.out.splitlines() if line.endswith("  v1"))
    assert named == f"net@{state['latest']}"
    assert project.call("pull", named, "--out", "named").code == 0, "what is printed can be pasted"
    back = project.call("rollback", "net", "production")
    assert (back.code, back.out.split()[:2]) == (0, ["net@production:", "v0"])
    planned = project.call("gc", "net", "--keep-latest", "0", "--keep-days", "0")
    assert "would remove 1 version," in planned.out
    assert f"v1 {state['labels']['v1']}" in planned.out
    assert "nothing was removed" in planned.err
    done = project.call("gc", "--keep-latest", "0", "--keep-days", "0", "--delete", "--json")
    assert len(json.loads(done.out)[0]["versions"]) == 1
    assert list(json.loads(project.call("versions", "net", "--json").out)["labels"]) == ["v0"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("publish", "nothing"), 3, "no such bundle"),
        (("pull", "nothing", "--out", "x"), 5, "no such model: nothing"),
        (("pull", "net", "--out", "mine"), 5, "would replace something that is not a bundle"),
        (("verify", "artifacts/net", "--key", "k.pub"), 3, "not from a registry"),
        (("list", "--registry", "nosuch://x"), 5, "begins with oci://"),
        (("list", "--registry", "oci://user:" + SECRET + "@host/x"), 5, "credentials in a registry's URL"),
        (("list", "--registry", "oci+http://127.0.0.1:9/x"), 5, "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_done_is_a_message_and_an_exit_code(
    project, registry, arguments, code, message, monkeypatch
):
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.001)
    write_bundle(project.artifacts / "net")
    (project.root / "mine").mkdir()
    (project.root / "mine/file").write_text("mine")
    assert project.call("publish", "net", "--label", "v0").code == 0
    done = project.call(*arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.err
    assert SECRET not in done.err
    assert "Traceback" not in done.err
    monkeypatch.delenv("ORTPREP_REGISTRY")
    nameless = project.call("list")
    assert (nameless.code, "export ORTPREP_REGISTRY=" in nameless.err) == (5, True)


def test_a_job_without_the_registry_extra_is_told_which_to_install(project, monkeypatch):
    import importlib.metadata

    none = importlib.metadata.EntryPoints(())
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: none)
    with pytest.raises(MissingExtraError, match="registry support is not installed") as raised:
        locate("registry://net@production")
    assert raised.value.hint == install_command("registry")
    assert locate(project.root) == project.root


# -- several kinds of hardware: what the page of registries tells users to run, on two machines

OTHER_MACHINE = """\
import ortprep.runtime.machine.hardware as hardware
real = hardware._correct_features
hardware._correct_features = lambda listed: real(listed) ^ {"avx512f"}
"""
"""A `sitecustomize` by which every process is on a machine whose graphs have blocks of another size."""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="blocks of one size")
def test_kinds_of_hardware_publish_into_one_version_from_which_each_pulls_its_own(tmp_path):
    page = (REPOSITORY / "docs/registry.md").read_text()
    section = page.partition("\n## Several kinds of hardware\n")[2].partition("\n## ")[0]
    build, serve = (block.split("```")[0].splitlines() for block in section.split("```bash\n")[1:])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(OTHER_MACHINE)
    machines = Project(tmp_path / "here"), Project(tmp_path / "there")
    paths = str(REPOSITORY), f"{tmp_path / 'other'}{os.pathsep}{REPOSITORY}"

    def type_in(project, line, path):
        program, *arguments = line.split()
        assert program == "ortprep", line
        there = {"PYTHONPATH": path, "ORTPREP_REGISTRY": str(tmp_path / "registry")}
        ended = project.run(*arguments, env=project.environment() | there)
        assert ended.code == 0, ended.err
        return ended

    for project, path in zip(machines, paths, strict=True):
        project.add(conv_net(), "mynet", inputs={"image": {"shapes": [[1, 3, 16, 16]]}}, tune=AS_PREPARED)
        for line in build:
            published = type_in(project, line, path)
    version = published.out.strip().partition("@")[2]
    assert type_in(machines[0], serve[0], paths[0]).out.startswith(f"mynet@production: 1.4 {version}")
    for project, path in zip(machines, paths, strict=True):
        type_in(project, serve[1], path)
        assert read_tree(project.root / "models" / "mynet") == read_tree(project.bundle("mynet"))
    assert read_tree(machines[0].bundle("mynet")) != read_tree(machines[1].bundle("mynet"))
