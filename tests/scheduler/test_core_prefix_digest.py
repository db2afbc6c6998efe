"""`PrefixDigest`: changes add up to what a cache holds, and the oldest of too many are dropped."""

from hypothesis import given
from hypothesis import strategies as st

from cadenza.kv.page_keys import SHORT_BYTES, PrefixDigest, split_keys

KEYS = [bytes([at]) * 32 for at in range(8)]


def applied(held: set[bytes], digest: PrefixDigest) -> set[bytes]:
    change = digest.take()
    return (held - {*split_keys(change.removed)}) | {*split_keys(change.added)}


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(["add", "remove", "take"]))))
def test_changes_give_exactly_the_newest_keys_that_are_held(acts: list[tuple[bytes, str]]) -> None:
    digest, told = PrefixDigest(max_keys=4), set[bytes]()
    held: list[bytes] = []
    for key, act in acts:
        short = key[:SHORT_BYTES]
        if act == "add":
            digest.add(key)
            held = held if short in held else [*held, short][-4:]
        elif act == "remove":
            digest.remove(key)
            held = [each for each in held if each != short]
        else:
            told = applied(told, digest)
            assert told == {*held}
    assert applied(told, digest) == {*held}
    assert len(digest) == len(held)
    assert digest.take() == (b"", b"")
