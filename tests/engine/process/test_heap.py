"""When a process that loads and then serves collects garbage."""

import gc
import subprocess
import sys

import pytest

from cadenza.engine.process.launch import loading

FREEZE = """
import gc
from cadenza.engine.process.launch import freeze_heap, loading
with loading():
    assert not gc.isenabled()
    freeze_heap()
    assert gc.isenabled() and gc.get_freeze_count() > 0
assert gc.isenabled()
"""


def test_no_garbage_is_collected_while_a_process_loads_or_fails_to():
    assert gc.isenabled()
    with loading():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no model"), loading():
        raise ValueError("no model")
    assert gc.isenabled()


def test_garbage_is_collected_again_once_the_heap_is_frozen():
    subprocess.run([sys.executable, "-c", FREEZE], check=True)
