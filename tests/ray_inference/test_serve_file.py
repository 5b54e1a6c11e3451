"""`ortprep serve-config` writes what Serve's schema takes; `serve run` takes it in `examples/eight_gpus`."""

import json
import shlex

import pytest
from ray.serve.schema import ServeDeploySchema

from ortprep.bundle.loader_config import read_loader_config, write_loader_config
from ortprep.errors import PoolError
from ortprep.ray_inference.config import ServeConfig
from ortprep.ray_inference.pinning import pin_version
from ortprep.ray_inference.serve_file import build_serve_file
from tests.runtime.pool.builders import write_doubling

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of tritonclient, and of Serve


@pytest.fixture
def bundles(tmp_path):
    """Two models, one of them tuned with four threads."""
    folders = [write_doubling(tmp_path / name) for name in "ab"]
    config = read_loader_config(folders[1])
    options = config.variants[0].session_options
    tuned = options._replace(attributes={**options.attributes, "intra_op_num_threads": 4})
    variants = tuple(one._replace(session_options=tuned) for one in config.variants)
    write_loader_config(folders[1], config._replace(variants=variants))
    return {folder.name: pin_version(folder)[1] for folder in folders}


def deployment_of(file):
    ServeDeploySchema.model_validate(file)
    ((deployment,),) = (one["deployments"] for one in file["applications"])
    return dict(deployment)


def test_models_share_replicas_with_the_threads_that_they_were_tuned_with(bundles):
    file = build_serve_file(bundles, ServeConfig(replicas=3))
    deployment = deployment_of(file)
    assert deployment["num_replicas"] == 3
    assert deployment["ray_actor_options"] == {"num_cpus": 4.0, "num_gpus": 0}
    assert list(deployment["user_config"]["bundles"]) == ["a", "b"]
    assert [(one["name"], one["route_prefix"]) for one in file["applications"]] == [("a-b", "/")]
    assert (
        deployment_of(build_serve_file(bundles, ServeConfig(cpus=2.0)))["ray_actor_options"]["num_cpus"] == 2
    )


@pytest.mark.attack
def test_nobody_else_reaches_what_is_served_unless_the_user_says_so(bundles):
    assert build_serve_file(bundles, ServeConfig())["http_options"]["host"] == "127.0.0.1"
    assert build_serve_file(bundles, ServeConfig(), host="0.0.0.0")["http_options"]["host"] == "0.0.0.0"


@pytest.mark.attack
def test_the_file_names_the_token_and_does_not_have_it(bundles, tmp_path):
    (tmp_path / "token").write_text("k9" * 16)
    file = build_serve_file(bundles, ServeConfig(token_file=str(tmp_path / "token")))
    assert file["applications"][0]["args"]["config"]["token_file"] == str(tmp_path / "token")
    assert "k9" * 16 not in json.dumps(file)


@pytest.mark.attack
def test_a_hint_runs_no_command_that_is_in_a_folders_name(tmp_path):
    folder = write_doubling(tmp_path / "a; touch x" / "net")
    with pytest.raises(PoolError) as caught:
        build_serve_file(dict([pin_version(folder)]), ServeConfig(device="cuda"))
    assert shlex.split(caught.value.hint or "") == ["ortprep", "show", str(folder)]
