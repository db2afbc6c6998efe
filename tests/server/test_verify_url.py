"""`cadenza verify --url`: the gate against a server, and a server that it must fail."""

import pytest

from cadenza.engine.request_check import RequestCheck
from cadenza.errors import ConfigError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import Request
from cadenza.verification.over_http import UrlOptions, verify_url
from cadenza.verification.workload import LONGEST_PROMPT
from tests.server.harness import RunningServer, running_server
from tests.server.scripted_engine import ScriptedEngine

OPTIONS = {"num_requests": 12, "max_tokens": 12}


class CrowdedEngine(ScriptedEngine):
    """Says something else to whoever is not alone: what the gate is there to find."""

    def submit(self, request: Request, passed: RequestCheck | None = None) -> int:
        if self.num_open:
            self.script = (*self.script[1:], self.script[0])
        return super().submit(request, passed)


def test_the_bundled_models_server_passes(bundled: RunningServer) -> None:
    result = verify_url(UrlOptions(url=bundled.url, **OPTIONS), lambda _: None)
    assert result.passed, result.last_line
    assert len(result.modes) == 3
    assert result.longest == LONGEST_PROMPT + 12
    assert result.last_line.endswith(f" longest={result.longest}")
    assert result.counts.admitted_midstream > 0
    assert result.counts.cache_hits > 0


def test_a_server_whose_streams_depend_on_others_fails(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    with running_server(CrowdedEngine(script, step_s=0.002), text) as server:
        result = verify_url(UrlOptions(url=server.url, **OPTIONS), lambda _: None)
    assert not result.passed
    assert result.mismatch is not None


@pytest.mark.parametrize("url", ["ftp://x", "http://127.0.0.1:1", "x"])
def test_a_server_that_is_not_there_is_said(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        verify_url(UrlOptions(url=url, **OPTIONS), lambda _: None)
