"""A Ray application without Ray: its flags, who uses which host, how many engines a load needs."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from cadenza.cli.app_flags import AppFlags
from cadenza.cluster.engine_host import EngineHost, HostOptions
from cadenza.cluster.group_stats import group_limits
from cadenza.cluster.remote_engine import HostBook, RemoteChild
from cadenza.cluster.scale_policy import EngineDemand, ScaleOptions, wanted_replicas
from cadenza.engine.process.child_process import EngineUnreachableError
from cadenza.engine.process.launch import Execute
from cadenza.errors import ConfigError
from tests.cluster.test_engine_host import COMMAND, SECRET, wait_for
from tests.engine.process.scripted_child import limits_of

OPTIONS = ScaleOptions(min_replicas=1, max_replicas=8, ttft_goal_s=2.0, quiet_s=600.0)


def demands(*queued_s: float, kv: float = 0.5) -> list[EngineDemand]:
    return [EngineDemand(queued_s=each, kv_usage=kv) for each in queued_s]


def wanted(*queued_s: float, kv: float = 0.5, current: int | None = None) -> int:
    now = len(queued_s) if current is None else current
    return wanted_replicas(OPTIONS, demands(*queued_s, kv=kv), now, 0.0, None)[0]


def test_prompts_that_wait_beyond_the_goal_have_engines_added_up_to_twice_as_many() -> None:
    assert wanted(1.9, 1.9) == 2
    assert wanted(2.1, 2.1) == 3
    assert wanted(4.0, 1.0) == 3
    assert wanted(3.0, 3.0, 3.0) == 5
    assert wanted(100.0, 100.0) == 4
    assert wanted(*[100.0] * 6) == 8
    assert wanted(*[100.0] * 8) == 8


def test_full_kv_has_one_added_whatever_waits() -> None:
    assert wanted(0.0, 0.0, kv=0.9) == 2
    assert wanted(0.0, 0.0, kv=0.91) == 3


def test_nothing_changes_while_some_still_load() -> None:
    assert wanted(100.0, 100.0, current=4) == 4
    assert wanted(current=2) == 2
    assert wanted_replicas(OPTIONS, demands(0.0), 2, 9e9, 0.0) == (2, None)


def play(readings: list[tuple[float, list[EngineDemand]]], current: int) -> list[int]:
    """What is wanted at each time, each time of as many as were wanted before."""
    found, since_s = [current], None
    for now_s, reading in readings:
        count, since_s = wanted_replicas(OPTIONS, reading, found[-1], now_s, since_s)
        found.append(count)
    return found[1:]


def test_one_goes_after_ten_quiet_minutes_and_the_next_after_ten_more() -> None:
    quiet = [(60.0 * minute, demands(0.3, 0.3, 0.3)) for minute in range(32)]
    assert play(quiet, 3) == [3] * 10 + [2] * 10 + [1] * 12


def test_a_moment_that_is_not_quiet_begins_the_ten_minutes_anew() -> None:
    readings = [(60.0 * minute, demands(0.3, 0.3)) for minute in range(16)]
    readings[8] = (480.0, demands(0.5, 0.5))
    assert play(readings, 2) == [2] * 16


def test_none_goes_whose_kv_would_not_fit_into_the_others() -> None:
    full = [(60.0 * minute, demands(0.0, 0.0, kv=0.5)) for minute in range(30)]
    assert set(play(full, 2)) == {2}
    fits = [(60.0 * minute, demands(0.0, 0.0, kv=0.4)) for minute in range(30)]
    assert play(fits, 2)[-1] == 1


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_replicas 3 must be from 1 to 2"):
        ScaleOptions(min_replicas=3, max_replicas=2)
    with pytest.raises(ConfigError, match="ttft_goal_s 0 must be above 0"):
        ScaleOptions(min_replicas=1, max_replicas=2, ttft_goal_s=0)
    with pytest.raises(ConfigError, match="max_kv_usage 90 must be"):
        ScaleOptions(min_replicas=1, max_replicas=2, max_kv_usage=90)


@pytest.fixture
def hosts(execute_scripted: Execute) -> Iterator[list[EngineHost]]:
    first = EngineHost(
        ("127.0.0.1", 0), SECRET, HostOptions(command=COMMAND, execute=execute_scripted)
    )
    second = EngineHost(
        ("127.0.0.1", 0), SECRET, HostOptions(command=COMMAND, execute=execute_scripted)
    )
    with closing(first), closing(second):
        yield [first, second]


def opened(open_child: Callable[[tuple[str, ...]], RemoteChild]) -> RemoteChild:
    return open_child(())


def test_each_place_has_a_host_of_its_own_and_takes_another_when_its_own_is_gone(
    hosts: list[EngineHost],
) -> None:
    known = [each.address for each in hosts]
    book = HostBook(lambda: known, SECRET)
    children = [opened(book.opener(place)) for place in range(2)]
    wait_for(lambda: [each.num_engines for each in hosts] == [1, 1])
    with pytest.raises(EngineUnreachableError, match="2 hosts are there, each of which serves"):
        opened(book.opener(2))
    for each in children:
        each.close(within_s=0.0)
    known.pop(0)
    with pytest.raises(EngineUnreachableError, match="1 hosts are there"):
        opened(book.opener(0))
    again = opened(book.opener(1))
    again.close(within_s=0.0)


def test_hosts_that_cannot_be_asked_for_are_tried_again_later() -> None:
    def ask() -> list[tuple[str, int]]:
        raise OSError("the directory does not answer")

    with pytest.raises(EngineUnreachableError, match="the directory does not answer"):
        opened(HostBook(ask, SECRET).opener(0))


def test_an_application_takes_the_flags_of_serve_by_their_names() -> None:
    flags = AppFlags.of({"model": "/m", "replicas": 3, "max_num_seqs": 8, "front_resources": {}})
    assert (flags.serve.model, flags.serve.replicas, flags.config.max_num_seqs) == ("/m", 3, 8)
    assert flags.engine_resources == {"num_cpus": 1}
    with pytest.raises(ConfigError, match="no flag max_num_seq "):
        AppFlags.of({"max_num_seq": 8})
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        AppFlags.of({"max_num_seq": 8})
    with pytest.raises(ConfigError, match="port has no meaning here: Ray Serve's ingress listens"):
        AppFlags.of({"port": 8000})
    with pytest.raises(ConfigError, match="log_level has no meaning here: Ray has logs"):
        AppFlags.of({"log_level": "debug"})


def test_an_application_says_how_many_front_ends_and_engines_there_may_be() -> None:
    flags = AppFlags.of({"replicas": 4, "fronts": 2, "autoscaling": {"ttft_goal_s": 1}})
    assert flags.fronts == 2
    assert flags.scale == ScaleOptions(min_replicas=1, max_replicas=4, ttft_goal_s=1)
    assert AppFlags.of({"replicas": 4}).scale is None
    with pytest.raises(ConfigError, match="fronts 0 must be a number from 1 to 16"):
        AppFlags.of({"fronts": 0})
    with pytest.raises(ConfigError, match="min_replicas 5 must be from 1 to 4, which is replicas"):
        AppFlags.of({"replicas": 4, "autoscaling": {"min_replicas": 5}})
    with pytest.raises(ConfigError, match="must be a mapping, with min_replicas, ttft_goal_s"):
        AppFlags.of({"autoscaling": {"target_ongoing_requests": 2}})
    with pytest.raises(ConfigError, match="autoscaling's quiet_s 'long' must be a number"):
        AppFlags.of({"autoscaling": {"quiet_s": "long"}})
    with pytest.raises(ConfigError, match="an application serves one model"):
        AppFlags.of({"max_loaded_models": 2})


def test_an_application_reads_values_as_the_command_line_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`serve run` passes texts."""
    monkeypatch.setenv("CADENZA_REPLICAS", "9")
    given = {
        "replicas": "2",
        "no_ui": "true",
        "api_key": ["one", "two"],
        "max_model_len": "auto",
        "engine_resources": '{"num_cpus": 2}',
        "autoscaling": '{"min_replicas": 1}',
        "fronts": "2",
    }
    flags = AppFlags.of(given)
    assert (flags.serve.replicas, flags.serve.no_ui, flags.fronts) == (2, True, 2)
    assert flags.serve.api_key == ["one", "two"]
    assert flags.config.max_model_len is None
    assert flags.engine_resources == {"num_cpus": 2}
    assert AppFlags.of({}).serve.replicas == 1
    with pytest.raises(ConfigError, match="'--replicas': Input should be greater"):
        AppFlags.of({"replicas": 0})
    with pytest.raises(ConfigError, match="'--request-timeout'"):
        AppFlags.of({"request_timeout": "soon"})
    with pytest.raises(ConfigError, match="no_ui 'maybe' must be true or false"):
        AppFlags.of({"no_ui": "maybe"})
    with pytest.raises(ConfigError, match="engine_resources 'all' must be a mapping"):
        AppFlags.of({"engine_resources": "all"})


def test_a_front_end_takes_more_calls_than_its_own_limits_allow() -> None:
    """So that they are answered with 429, and not left to wait where nobody counts them."""
    flags = AppFlags.of({"replicas": 3, "max_num_seqs": 8, "max_num_queued_reqs": 100})
    own = group_limits(limits_of(flags.config), 3).max_num_open_reqs
    assert own == 324 < flags.max_ongoing_requests


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
