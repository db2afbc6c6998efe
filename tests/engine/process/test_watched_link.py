"""Who watches an engine in a process of its own, when that process is lost."""

import os
import signal

from cadenza.engine.step_watch import LiveNews, StepSummary
from tests.engine.process.conftest import TIMEOUT_S, OpenFront, request


def test_who_watches_is_told_of_a_lost_engine_and_sees_the_next_one_with_new_labels(
    open_front: OpenFront,
):
    front, news = open_front(step_s=0.03), list[LiveNews]()
    front.engine.watch(news.append)
    front.engine.wait_ready(TIMEOUT_S)
    front.engine.submit(request(max_tokens=20))
    front.wait(lambda: any(labels_in(each) for each in news))
    pid = front.link.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    front.wait_ends(1)
    front.wait(lambda: isinstance(news[-1], StepSummary) and not news[-1].rows)
    lost, ready = news.index("lost"), len(news) - 1 - news[::-1].index("ready")
    assert 0 < lost < ready
    before = {label for each in news[:lost] for label in labels_in(each)}
    after = {label for each in news[ready:] for label in labels_in(each)}
    assert before
    assert not before & after
    front.engine.watch(None)
    num_news = len(news)
    front.engine.submit(request())
    front.wait_ends(2)
    assert len(news) == num_news


def labels_in(news: LiveNews) -> set[int]:
    return {row.label for row in news.rows} if isinstance(news, StepSummary) else set()
