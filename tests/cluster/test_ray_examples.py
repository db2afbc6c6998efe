"""The files for Ray are what they say: their arguments are flags, and what they ask for fits.

Nothing here runs Ray or Kubernetes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cadenza.cli.app_flags import AppFlags

FOLDER = Path(__file__).parents[2] / "examples" / "ray"


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def serve_config(name: str) -> dict[str, Any]:
    found = read(name)
    return yaml.safe_load(found["spec"]["serveConfigV2"]) if "spec" in found else found


@pytest.mark.parametrize("name", ["serve.yaml", "kuberay.yaml"])
def test_arguments_are_flags_and_the_clients_connections_are_at_the_head(name: str) -> None:
    config = serve_config(name)
    (application,) = config["applications"]
    assert application["import_path"] == "cadenza.serve_app:app"
    flags = AppFlags.of(application["args"])
    assert flags.scale is not None
    assert flags.scale.max_replicas == flags.serve.replicas > flags.scale.min_replicas
    assert config["proxy_location"] == "HeadOnly"
    assert flags.front_resources == {"num_cpus": 0, "resources": {"front": 0.01}}


def test_the_manifests_groups_have_what_the_application_asks_of_them() -> None:
    flags = AppFlags.of(serve_config("kuberay.yaml")["applications"][0]["args"])
    cluster = read("kuberay.yaml")["spec"]["rayClusterConfig"]
    head, (engines,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert json.loads(json.loads(head["rayStartParams"]["resources"].strip("'"))) == {"front": 1}
    assert engines["minReplicas"] <= engines["replicas"] <= engines["maxReplicas"]
    assert engines["maxReplicas"] == flags.serve.replicas
    containers = [each["template"]["spec"]["containers"][0] for each in (head, engines)]
    assert int(containers[1]["resources"]["limits"]["cpu"]) >= flags.engine_resources["num_cpus"]
    for each in containers:
        assert {"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "1"} in each["env"]
        folders = [mount["mountPath"] for mount in each["volumeMounts"]]
        assert Path(str(flags.serve.model)).parent.as_posix() in folders


def test_the_image_has_the_extra_of_the_package() -> None:
    project = (FOLDER.parents[1] / "pyproject.toml").read_text()
    wanted = "ray[serve]>=2.56"
    assert f'ray = ["{wanted};' in project
    assert wanted in (FOLDER / "Dockerfile").read_text()
