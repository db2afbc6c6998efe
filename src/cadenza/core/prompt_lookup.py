"""`PromptLookup`: proposes what followed the newest tokens where they occurred before.

An index of one sequence's n-grams, extended as the sequence grows. Invariant: a token is indexed
once, and a proposal looks at a bounded number of earlier places, so the work of a step does not
grow with the sequence.
"""

from itertools import takewhile

MAX_CANDIDATES = 16
"""Earlier places, the newest first, of which the longest match is chosen."""


class PromptLookup:
    """Proposals for one sequence from its own tokens, and before them from a prediction.

    Args:
        shortest: tokens that must match, at least.
        longest: tokens that are compared at most; a longer match is not preferred.
        prediction: tokens that the output may repeat, looked up like the sequence's own.
        placeholder: a token that is never proposed.
    """

    def __init__(
        self,
        *,
        shortest: int,
        longest: int,
        prediction: tuple[int, ...] = (),
        placeholder: int | None = None,
    ) -> None:
        self._shortest = shortest
        self._longest = longest
        self._num_predicted = len(prediction)
        self._placeholder = placeholder
        self._tokens: list[int] = []
        self._newest: dict[tuple[int, ...], int] = {}
        """Where an n-gram of the shortest length last ended."""
        self._earlier: list[int] = []
        """For each token, where the n-gram that ends there ended before; 0 if nowhere."""
        self._extend(list(prediction))

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `token_ids`, which start with those given before."""
        self._extend(token_ids[len(self._tokens) - self._num_predicted :])
        end = self._find_longest()
        if not end:
            return []
        # A copy that reaches the newest token goes on with what it has copied.
        period = len(self._tokens) - end
        found = [self._tokens[end + index % period] for index in range(most)]
        return list(takewhile(lambda token_id: token_id != self._placeholder, found))

    def _extend(self, token_ids: list[int]) -> None:
        tokens, newest, length = self._tokens, self._newest, self._shortest
        for token_id in token_ids:
            tokens.append(token_id)
            end = len(tokens)
            if end < length:
                self._earlier.append(0)
                continue
            gram = tuple(tokens[end - length :])
            self._earlier.append(newest.get(gram, 0))
            newest[gram] = end

    def _find_longest(self) -> int:
        """Where the longest match of the newest tokens ends; 0 if there is none."""
        if not self._tokens:
            return 0
        best, best_length = 0, 0
        end = self._earlier[-1]
        for _ in range(MAX_CANDIDATES):
            if not end or best_length == self._longest:
                break
            length = self._match_length(end)
            if length > best_length:
                best, best_length = end, length
            end = self._earlier[end - 1]
        return best

    def _match_length(self, end: int) -> int:
        """How many tokens before `end` equal the newest ones, up to `longest`."""
        tokens, length = self._tokens, self._shortest
        most = min(self._longest, end)
        while length < most and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
