"""What the build of a wheel recorded of itself (`setup.py` writes it)."""

import json
from collections.abc import Mapping
from importlib import resources

RECORD = "build.json"


def read_build() -> Mapping[str, str]:
    """Of `commit`, `platform` and `compiler` what the build knew; empty in a source tree."""
    try:
        return json.loads(resources.files("cadenza").joinpath(RECORD).read_text("utf-8"))
    except FileNotFoundError:
        return {}
