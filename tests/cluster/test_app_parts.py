"""What a Ray application is made of, without Ray: its flags, and who uses which host."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from cadenza.cli.app_flags import AppFlags
from cadenza.cluster.engine_host import EngineHost, HostOptions
from cadenza.cluster.group_stats import group_limits
from cadenza.cluster.remote_engine import HostBook, RemoteChild
from cadenza.cluster.scale_policy import ScaleOptions
from cadenza.engine.process.child_process import EngineUnreachableError
from cadenza.engine.process.launch import Execute
from cadenza.errors import ConfigError
from tests.cluster.test_engine_host import COMMAND, SECRET, wait_for
from tests.engine.process.scripted_child import limits_of


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
