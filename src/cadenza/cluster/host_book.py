"""`HostBook`: which engine host each replica of a front end uses: one that no other replica uses,
the last one first. Thread-safe. Invariant: a host has one replica at most of a front end.
"""

import threading
from collections.abc import Callable, Sequence

from cadenza.cluster.remote_engine import RemoteChild
from cadenza.engine.process.process_link import EngineUnreachableError

Address = tuple[str, int]


class HostBook:
    """`find_hosts` returns the addresses of the hosts that are there, the oldest first, so that all
    front ends take them in the same order; it may raise OSError. `front`: this one's number."""

    def __init__(
        self, find_hosts: Callable[[], Sequence[Address]], secret: bytes, front: int = 0
    ) -> None:
        self._find_hosts = find_hosts
        self._secret = secret
        self._front = front
        self._lock = threading.Lock()
        self._taken: dict[int, Address] = {}

    def opener(self, place: int) -> Callable[[Sequence[str]], RemoteChild]:
        """Opens the engines of a place. It raises EngineUnreachableError where no host is free."""

        def open_child(_: Sequence[str]) -> RemoteChild:
            return RemoteChild(self._take(place), self._secret, self._front)

        return open_child

    def _take(self, place: int) -> Address:
        try:
            known = [(str(host), int(port)) for host, port in self._find_hosts()]
        except OSError as error:
            raise EngineUnreachableError(f"hosts are not known: {error}") from error
        with self._lock:
            last = self._taken.pop(place, None)
            free = [each for each in known if each not in self._taken.values()]
            # The one that was lost last comes last: a machine that is gone is known for a while.
            free.sort(key=lambda each: each == last)
            if not free:
                raise EngineUnreachableError(
                    f"{len(known)} hosts are there, each of which serves another place"
                )
            self._taken[place] = free[0]
            return free[0]
