"""The gate against code hidden in data finds each banned thing, and nothing else."""

from pathlib import Path

import pytest

from tools import banned_calls

pytestmark = pytest.mark.gates


BANNED = [
    "import pickle",
    "import pickle as p",
    "from pickle import loads",
    "import dill.source",
    "import marshal",
    "def f():\n    import shelve",
    "eval('1')",
    "exec('x = 1')",
    "import builtins\nbuiltins.exec('x = 1')",
    "import yaml\nyaml.load(stream)",
    "from yaml import load",
    "from torch import load",
    "import torch\ntorch.load(path)",
    "import numpy as np\nnp.load(path, allow_pickle=True)",
    "import numpy as np\nnp.load(path, allow_pickle=flag)  # noqa: S301",
    "AutoModel.from_pretrained(path, trust_remote_code=True)",
    "def f(:",
]
ALLOWED = [
    "import json",
    "import numpy as np\nnp.load(path, allow_pickle=False)",
    "model.eval()",
    "import yaml\nyaml.safe_load(stream)",
    "import pickleball",
    "import re\nre.compile('x')",
    "text = 'pickle.loads(x)'",
]


def gate_on(root: Path, text: str) -> int:
    source = root / "src" / "cadenza" / "a.py"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(text + "\n", encoding="utf-8")
    return banned_calls.main([str(root)])


def test_the_gate_fails_on_a_banned_thing_and_passes_what_only_looks_alike(tmp_path: Path):
    assert [text for text in BANNED if gate_on(tmp_path, text) != 1] == []
    assert [text for text in ALLOWED if gate_on(tmp_path, text) != 0] == []
