"""The cookbook's scripts: which passage is found, and that a batch file goes on where it was
cut."""

import json
from pathlib import Path

import openai
import pytest

from examples import batch_file, rag
from tests.server.harness import RunningServer


@pytest.fixture
def client(bundled: RunningServer):
    with openai.OpenAI(base_url=f"{bundled.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("question", "passage"),
    [("Where do foxes sleep?", rag.PASSAGES[2]), ("Who learned to swim?", rag.PASSAGES[3])],
)
def test_the_passage_that_a_question_is_about_is_found(
    client: openai.OpenAI, question: str, passage: str
) -> None:
    assert rag.nearest(client, rag.PASSAGES, question) == [passage]


def line(name: str, **body: object) -> str:
    body = {"prompt": "12 + 30 =", "max_tokens": 4, "temperature": 0, **body}
    asked = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(asked) + "\n"


def run(server: RunningServer, folder: Path) -> tuple[int, dict[str, dict]]:
    """The exit code, and the answers' lines by their names."""
    questions, answers = folder / "questions.jsonl", folder / "answers.jsonl"
    code = batch_file.main([server.url, str(questions), str(answers), "--at-once", "3"])
    lines = [json.loads(each) for each in answers.read_text().splitlines()]
    return code, {each["custom_id"]: each for each in lines}


def test_a_batch_file_that_was_cut_goes_on_and_ends_with_the_same_answers(
    bundled: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(each) for each in range(7)]
    (tmp_path / "questions.jsonl").write_text("".join(map(line, names)))
    code, whole = run(bundled, tmp_path)
    assert code == 0
    assert set(whole) == set(names)
    texts = {each["response"]["body"]["choices"][0]["text"].strip() for each in whole.values()}
    assert texts == {"42"}
    answers = tmp_path / "answers.jsonl"
    kept = answers.read_text().splitlines(keepends=True)[:3]
    answers.write_text("".join(kept) + '{"custom_id": "of a line that was c')
    code, again = run(bundled, tmp_path)
    assert capsys.readouterr().out.endswith("4 answered, 0 of them with an error; 3 were there\n")
    assert set(again) == set(names)


def test_a_question_that_fails_has_its_error_and_is_asked_again(
    bundled: RunningServer, tmp_path: Path
) -> None:
    (tmp_path / "questions.jsonl").write_text(line("good") + line("bad", temperature=-1))
    for _ in range(2):
        code, found = run(bundled, tmp_path)
        assert code == 1
        assert found["good"]["error"] is None
        assert found["bad"]["response"]["status_code"] == 400
        assert found["bad"]["error"]["error"]["param"] == "temperature"
    assert (tmp_path / "answers.jsonl").read_text().count('"good"') == 1


def test_a_file_of_passages_has_one_on_each_line_that_is_not_blank(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("one\n\n  \ntwo\n")
    assert rag.lines_of(tmp_path / "notes.txt") == ["one", "two"]
