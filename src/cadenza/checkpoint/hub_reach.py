"""`is_silent`: whether a network drops what is sent to the hub, found before its client waits ten
seconds for each address, and for names as long as the system does. The limit is of all of it: the
name, every address, the proxy that the environment names."""

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

CONNECT_S = 1.1  # a packet that was lost is sent again after a second
LIMIT_VARIABLE = "HF_HUB_ETAG_TIMEOUT"
MAX_ADDRESSES = 8
PORTS = {"http": 80, "https": 443}

Resolve = Callable[..., list[Any]]


def connect_limit_s() -> float:
    """huggingface_hub's variable, or `CONNECT_S`."""
    try:
        return float(os.environ[LIMIT_VARIABLE])
    except (KeyError, ValueError):
        return CONNECT_S


def is_silent(endpoint: str, limit_s: float, resolve: Resolve = socket.getaddrinfo) -> bool:
    """Whether nothing answers in time; an error that comes in time is left to the client."""
    hop = _first_hop(endpoint)
    if hop is None:
        return False
    end_s = time.monotonic() + limit_s
    found: SimpleQueue[list[Any]] = SimpleQueue()

    def look_up() -> None:
        try:
            found.put(resolve(*hop, type=socket.SOCK_STREAM))
        except OSError:
            found.put([])

    Thread(target=look_up, daemon=True, name="hub-name").start()
    try:
        addresses = found.get(timeout=limit_s)
    except Empty:
        return True
    return _is_silent(addresses[:MAX_ADDRESSES], end_s)


def _first_hop(endpoint: str) -> tuple[str, int] | None:
    """Host and port of the proxy, or of the hub; None where the client has to say what is wrong."""
    try:
        parts = urlsplit(endpoint)
        host = parts.hostname or ""
        named = {} if not host or proxy_bypass(host) else getproxies()
        proxy = named.get(parts.scheme) or named.get("all")
        if proxy is not None:
            parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        port = parts.port or PORTS.get(parts.scheme)
    except ValueError:
        return None
    return (parts.hostname, port) if parts.hostname and port else None


def _is_silent(addresses: list[Any], end_s: float) -> bool:
    """Whether none is connected in time, and not all failed: all are tried together."""
    with ExitStack() as opened, selectors.DefaultSelector() as waiting:
        for family, kind, protocol, _, address in addresses:
            try:
                tried = opened.enter_context(socket.socket(family, kind, protocol))
            except OSError:  # a family that this machine lacks
                continue
            tried.setblocking(False)
            error = tried.connect_ex(address)
            if error == 0:
                return False
            if error == errno.EINPROGRESS:
                waiting.register(tried, selectors.EVENT_WRITE)
        while waiting.get_map():
            ready = waiting.select(max(0.0, end_s - time.monotonic()))
            if not ready:
                return True
            for key, _ in ready:
                tried = cast(socket.socket, key.fileobj)
                if not tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    return False
                waiting.unregister(tried)
    return False
