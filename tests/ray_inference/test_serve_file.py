"""`ortprep serve-config` writes what `serve deploy` takes as it is.

`serve run` takes it in the recipe `examples/eight_gpus`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
import yaml
from ray.serve.schema import ServeDeploySchema

from ortprep.bundle.codec import encode
from ortprep.errors import BundleError, PoolError
from ortprep.ray_inference import ServeConfig
from ortprep.ray_inference.pinning import PinnedBundle, pin_version
from ortprep.ray_inference.serve_file import BundleFigures, plan_serve_file, read_bundle_figures
from ortprep.runtime.placement import ModelLoad
from tests.fakes import free_port, wait_for
from tests.runtime.pool.builders import write_doubling

GB = 2**30
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of tritonclient, and of Serve

SERVE = str(Path(sys.executable).parent / "serve")


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


def start_head(folder: Path) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
    """Starts `ray start --head`; returns its process and the environment to reach it."""
    port, dashboard = free_port(), free_port()
    environment = {
        **os.environ,
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=4",
        f"--port={port}", f"--dashboard-port={dashboard}", "--object-store-memory=100000000",
        f"--ray-client-server-port={free_port()}", f"--temp-dir={folder}",
        f"--dashboard-agent-listen-port={free_port()}",
    ]  # fmt: skip
    started = {key: value for key, value in environment.items() if key != "RAY_ADDRESS"}
    with (folder / "start.log").open("wb") as log:
        head = subprocess.Popen(command, env=started, start_new_session=True, stdout=log, stderr=log)
    return head, environment


@pytest.fixture(scope="module")
def cluster_address():
    """A cluster of one node with a dashboard; the environment to reach it."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # short: sockets lie below it
    for _ in range(3):  # Ray gives up after 30 s, which a busy machine may need
        head, environment = start_head(folder)
        wait_for(partial(has_started_or_ended, head, folder / "start.log"), what="the node is there")
        if head.poll() is None:
            break
    yield environment
    head.terminate()  # alone: it ends the others, and waits in vain for those that end by themselves
    try:
        head.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(head.pid, signal.SIGKILL)
        head.wait()
    shutil.rmtree(folder, ignore_errors=True)


def has_started_or_ended(head: subprocess.Popen[bytes], log: Path) -> bool:
    return head.poll() is not None or b"Ray runtime started" in log.read_bytes()


def is_served(client: Any) -> bool:
    with contextlib.suppress(Exception):
        return bool(client.is_model_ready("squeezenet"))
    return False


def serves_squeezenet(client: Any) -> bool:
    return bool(client.get_model_metadata("squeezenet")["inputs"][0]["name"] == "data_0")


def classify(client: Any) -> None:
    image = np.ones((1, 3, 224, 224), np.float32)
    tensor = tritonclient.http.InferInput("data_0", image.shape, "FP32")
    tensor.set_data_from_numpy(image)
    answer = client.infer("squeezenet", [tensor]).as_numpy("softmaxout_1")
    assert answer.sum() == pytest.approx(1, abs=1e-3)


def find_replicas() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cmdline").read_bytes().startswith(b"ray::ServeReplica:squeezenet:"):
                found.add(path.name)
    return found


def run_serve(environment: dict[str, str], *arguments: str) -> str:
    until = time.monotonic() + 300
    while True:  # the dashboard takes a while to come up
        done = subprocess.run(
            [SERVE, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        if done.returncode == 0:
            return done.stdout
        assert time.monotonic() < until, done.stdout + done.stderr
        time.sleep(1)


def call_serve(dashboard: str, config: dict[str, Any] | None = None) -> Any:
    """Returns the status of all applications, or deploys a configuration as `serve deploy` does."""
    request = urllib.request.Request(f"{dashboard}/api/serve/applications/")
    if config is not None:
        request.method, request.data = "PUT", json.dumps(config).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=600) as response:
        text = response.read()
    return json.loads(text) if text else None


@pytest.mark.manual
def test_serve_deploy_takes_the_file_as_it_is_and_updates_replicas_in_place(
    cluster_address, squeezenet, bundle, tmp_path
):
    port = free_port()
    written = squeezenet.run("serve-config", "squeezenet", "--http-port", str(port))
    assert written.code == 0, written.err
    file = tmp_path / "serve.yaml"
    file.write_text(written.out)
    assert yaml.safe_load(written.out)["applications"][0]["name"] == "squeezenet"
    dashboard = cluster_address["RAY_DASHBOARD_ADDRESS"]
    run_serve(cluster_address, "deploy", str(file), "--address", dashboard)
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}")
    wait_for(lambda: is_served(client), what="the model is served")
    classify(client)
    replica = find_replicas()
    # Another version differs in `user_config` alone, so the replica goes on, and answers all the while.
    changed = yaml.safe_load(written.out)
    _, other = pin_version(str(bundle))
    changed["applications"][0]["deployments"][0]["user_config"]["bundles"]["squeezenet"] = encode(other)
    call_serve(dashboard, changed)
    wait_for(lambda: not serves_squeezenet(client), what="the other version is served")
    assert find_replicas() == replica
    wait_for(
        lambda: call_serve(dashboard)["applications"]["squeezenet"]["status"] == "RUNNING", what="it runs"
    )
    client.close()
