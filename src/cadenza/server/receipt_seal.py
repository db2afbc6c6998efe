"""`ReceiptSeal`: marks receipts as this server's, and tells whether one is.

Owns a secret of this process. A seal is of a tenant and of what an answer follows from, not of the
answer: a receipt with another answer is computed again, and found to differ. Invariant: nobody can
have the server compute what it did not compute for that tenant before.
"""

import hmac
import secrets
from dataclasses import replace
from hashlib import sha256

import msgspec

from cadenza.receipt import Receipt

_SEED_HEX = 16


class ReceiptSeal:
    """With a secret of its own, which ends with the process."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or secrets.token_bytes(32)

    def sealed(self, receipt: Receipt, tenant: str) -> Receipt:
        """The receipt with its seal, which begins with the seed: JavaScript rounds large ones."""
        seal = f"{receipt.params.seed or 0:0{_SEED_HEX}x}{self._mac(receipt, tenant)}"
        return msgspec.structs.replace(receipt, seal=seal)

    def opened(self, receipt: Receipt, tenant: str) -> Receipt | None:
        """The receipt with its exact seed, if it is the tenant's own; otherwise None."""
        seal = receipt.seal if isinstance(receipt.seal, str) else ""
        try:
            seed = int(seal[:_SEED_HEX], 16)
        except ValueError:
            return None
        if float(seed) != float(receipt.params.seed or 0):
            return None
        exact = msgspec.structs.replace(receipt, params=replace(receipt.params, seed=seed))
        is_own = hmac.compare_digest(seal[_SEED_HEX:], self._mac(exact, tenant))
        return exact if is_own else None

    def _mac(self, receipt: Receipt, tenant: str) -> str:
        kept = receipt.kept if isinstance(receipt.kept, bytes) else None
        sealed = (tenant, receipt.fingerprint, receipt.prompt_token_ids, receipt.params, kept)
        return hmac.new(self._secret, msgspec.json.encode(sealed), sha256).hexdigest()
