"""The structured outputs of the documents, with the model that `cadenza serve` has there."""

import json
import re
from pathlib import Path

from tests.server.harness import RunningServer

SERVING = Path(__file__).parents[2] / "docs" / "serving.md"


def test_the_structured_output_of_the_documents_is_what_they_say(bundled: RunningServer) -> None:
    section = SERVING.read_text().partition("## Structured outputs")[2]
    command = re.search(r"curl http://127.0.0.1:8000(\S+) .*?-d '(.*?)'\n", section, re.DOTALL)
    answer = re.search(r"The content is `(.*?)`", section)
    assert command is not None
    assert answer is not None
    choice = bundled.post(command[1], json.loads(command[2])).json()["choices"][0]
    assert choice["message"]["content"] == answer[1]
    assert choice["finish_reason"] == "stop"
    assert json.loads(answer[1]) == {"city": "Paris"}
