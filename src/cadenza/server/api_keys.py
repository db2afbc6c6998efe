"""API keys: who may ask, and as whom.

Owns the comparing, which takes the same time whatever is presented. Invariant: without a valid key
nobody is a tenant, unless no key was configured; keys themselves are not kept.
"""

import hmac
import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from cadenza.errors import ConfigError

MIN_KEY_CHARS = 8
_BEARER = re.compile(rb"[Bb]earer +([!-~]+)")


class ApiKeys:
    """The keys that open this server.

    Raises:
        ConfigError: a key is too short, or has characters that no header can carry.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        listed = list(dict.fromkeys(keys))
        for key in listed:
            if len(key) < MIN_KEY_CHARS or not re.fullmatch(r"[!-~]+", key):
                raise ConfigError(
                    f"an API key has {len(key)} characters; give at least {MIN_KEY_CHARS}, "
                    f"visible ASCII characters only"
                )
        self._digests = [sha256(key.encode()).digest() for key in listed]

    @property
    def is_open(self) -> bool:
        """No key was configured: everybody may ask, as one tenant."""
        return not self._digests

    def tenant_of(self, authorization: bytes | None) -> str | None:
        """Whom an `Authorization` header stands for; None when for nobody."""
        if self.is_open:
            return ""
        matched = _BEARER.fullmatch(authorization or b"")
        presented = sha256(matched.group(1) if matched else b"").digest()
        found: str | None = None
        for digest in self._digests:  # all of them, so that the time tells nothing
            if hmac.compare_digest(presented, digest):
                found = digest.hex()
        return found if matched else None


def read_keys(given: Iterable[str], file: Path | None) -> list[str]:
    """Keys of flags and of a file, one a line; a line that begins with `#` is a comment.

    An empty key, as of a variable that is not set, is an error and never an open server.

    Raises:
        ConfigError: the file cannot be read or holds no key.
    """
    keys = list(given)
    if file is None:
        return keys
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--api-key-file {file} cannot be read; give a text file") from None
    lines = (line.strip() for line in text.splitlines())
    keys += [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {file} holds no key; one a line")
    return keys
