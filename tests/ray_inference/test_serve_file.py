"""`ortprep serve-config` writes what Serve's schema takes; `serve run` takes it in `examples/eight_gpus`."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from ortprep.errors import BundleError, PoolError
from ortprep.ray_inference.config import ServeConfig
from ortprep.ray_inference.pinning import PinnedBundle, pin_version
from ortprep.ray_inference.serve_file import BundleFigures, plan_serve_file, read_bundle_figures
from ortprep.runtime.placement import ModelLoad
from tests.runtime.pool.builders import write_doubling

GB = 2**30
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of tritonclient, and of Serve


def figures(name: str, **changes: Any) -> BundleFigures:
    given: dict[str, Any] = {"ms": 10.0, "memory": GB, "on_gpu": False, "device_bytes": 16 * GB, **changes}
    load = ModelLoad(name, given["ms"], given["memory"])
    pinned = PinnedBundle(f"/models/{name}", "sha256:" + "0" * 64)
    return BundleFigures(pinned, load, 2.0, 4, given["on_gpu"], given["device_bytes"])


def deployment_of(file: dict[str, Any], at: int = 0) -> dict[str, Any]:
    ServeDeploySchema.model_validate(file)
    (deployment,) = file["applications"][at]["deployments"]
    return dict(deployment)


def test_models_that_fit_a_device_share_its_replicas():
    file = plan_serve_file([figures("a"), figures("b")], ServeConfig(replicas=3))
    deployment = deployment_of(file)
    assert deployment["num_replicas"] == 3
    assert deployment["ray_actor_options"] == {"num_cpus": 4.0, "num_gpus": 0, "memory": int(2.5 * GB)}
    assert list(deployment["user_config"]["bundles"]) == ["a", "b"]
    assert [(one["name"], one["route_prefix"]) for one in file["applications"]] == [("a-b", "/")]


def test_models_that_do_not_fit_a_device_are_applications_of_their_own():
    models = [figures(name, memory=9 * GB, on_gpu=True) for name in "ab"]
    file = plan_serve_file(models, ServeConfig())
    assert [one["route_prefix"] for one in file["applications"]] == ["/a", "/b"]
    assert deployment_of(file, 1)["ray_actor_options"] == {"num_cpus": 4.0, "num_gpus": 1.0}
    with pytest.raises(PoolError, match="no device has room for a"):
        plan_serve_file([figures("a", memory=17 * GB)], ServeConfig())
    with pytest.raises(PoolError, match="models for GPUs and models for CPUs"):
        plan_serve_file([figures("a"), figures("b", on_gpu=True)], ServeConfig())


@pytest.mark.attack
def test_nobody_else_reaches_what_is_served_unless_the_user_says_so():
    given = [figures("a")]
    assert plan_serve_file(given, ServeConfig())["http_options"]["host"] == "127.0.0.1"
    assert plan_serve_file(given, ServeConfig(), host="0.0.0.0")["http_options"]["host"] == "0.0.0.0"


@pytest.mark.attack
def test_the_file_names_the_token_and_does_not_have_it(tmp_path):
    (tmp_path / "token").write_text("k9" * 16)
    file = plan_serve_file([figures("a")], ServeConfig(token_file=str(tmp_path / "token")))
    assert file["applications"][0]["args"]["config"]["token_file"] == str(tmp_path / "token")
    assert "k9" * 16 not in json.dumps(file)


@pytest.mark.attack
@pytest.mark.parametrize("hardware", [{"gpus": "abc"}, {"cores": "x"}, "abc"])
def test_the_hardware_in_a_manifest_is_read_as_such(tmp_path, hardware):
    folder = tmp_path / "conv"
    shutil.copytree(Path(__file__).parents[1] / "compat" / "0.1.0" / "conv", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["environment"]["hardware"] = hardware
    (folder / "manifest.json").write_text(json.dumps(manifest))
    name, pinned = pin_version(str(folder))
    with pytest.raises(BundleError):
        read_bundle_figures(name, pinned, ServeConfig())


@pytest.mark.attack
def test_a_hint_runs_no_command_that_is_in_a_folders_name(tmp_path):
    folder = write_doubling(tmp_path / "a; touch x" / "net")
    name, pinned = pin_version(str(folder))
    with pytest.raises(PoolError) as caught:
        read_bundle_figures(name, pinned, ServeConfig(device="cuda"))
    assert shlex.split(caught.value.hint or "") == ["ortprep", "show", str(folder)]


def test_short_runs_have_more_requests_at_a_replica_than_long_ones():
    short, long = (
        deployment_of(plan_serve_file([figures("a", ms=ms)], ServeConfig())) for ms in (0.1, 500.0)
    )
    assert (short["max_ongoing_requests"], long["max_ongoing_requests"]) == (64, 3)
    assert short["max_queued_requests"] > long["max_queued_requests"] == 16
    assert (short["health_check_period_s"], long["health_check_period_s"]) == (10.0, 50.0)
