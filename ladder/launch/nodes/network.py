"""How nodes reach each other: addresses, interfaces, and a try at connecting, with a token that only ours know."""

from __future__ import annotations

import errno
import select
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import psutil

from ladder.launch.watch import now

ALIVE_SECONDS = 0.5
"""Between two signs of life of an agent, and of its controller. Chosen: several of them before a doubt."""
DOUBT_SECONDS = 1.5
"""After this silence a program's host is asked whether it is still there. Chosen: if the host has lost its power or its
network, the answer and the end of the ranks then still come within five seconds."""
_HOST_SECONDS = 1.5
"""For a host's answer. Chosen: TCP asks once more after a second, so that one lost packet does not count."""
_DISCARD_PORT = 9
"""Chosen: hardly any host listens there, so that its kernel refuses the connection, which is an answer, and no program
sees it."""

_TRY_SECONDS = 3.0
"""For a connection. Chosen: an address of the same network answers in milliseconds, one behind a firewall never."""
_SERVED_SECONDS = 120.0
"""How long the others may try at most. Chosen: many times what all addresses of a node with ten networks take."""
_ANSWERS = (0, errno.ECONNREFUSED)


def own_addresses() -> list[str]:
    """This node's IP addresses: IPv4 before IPv6, those that only the node itself can use last."""
    found = [
        (address.family == socket.AF_INET6, address.address.partition("%")[0])
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    usable = [(is_v6, address) for is_v6, address in found if not address.startswith("fe80")]  # needs an interface
    return [address for is_v6, address in sorted(usable, key=lambda each: (_is_loopback(each[1]), each[0]))]


def interface_of(address: str) -> str | None:
    """The network interface over which this node reaches `address`, which may be its own; None if there is none."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: it only chooses a route. 9 is the discard port.
            own = probe.getsockname()[0]
        except OSError:
            return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return name
    return None


def served(token: str, over: threading.Event) -> int:
    """Say `token` to whoever connects until it is `over`; returns the port, on all of this node's addresses.

    The token tells that it was this node that answered, not another one's or another program. It opens nothing.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6)

    def answer() -> None:
        listener.settimeout(1.0)
        with listener:
            for _ in range(int(_SERVED_SECONDS)):
                if over.is_set():
                    return
                with suppress(OSError):
                    peer, _ = listener.accept()
                    with peer:
                        peer.sendall(token.encode())

    threading.Thread(target=answer, daemon=True).start()
    return int(listener.getsockname()[1])


def reachable(addresses: Sequence[str], port: int, token: str) -> list[str]:
    """Those of `addresses` at which the node that serves `token` answers."""
    return [address for address in addresses if _heard(address, port) == token]


def answering(addresses: Sequence[str]) -> str | None:
    """The first of `addresses` at which another host answers; None if none does.

    It is the host's kernel that answers, also while a lack of memory or of cores holds up all its programs. An address
    that this host has too, as those of virtual bridges, would be answered by this host itself, so it does not count.
    """
    own = own_addresses()
    with ExitStack() as stack:
        asked: dict[socket.socket, str] = {}
        for address in (each for each in addresses if each not in own and not _is_loopback(each)):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            except OSError:  # this host's kernel has no IPv6
                continue
            status = probe.connect_ex((address, _DISCARD_PORT))
            if status in _ANSWERS:
                return address
            if status == errno.EINPROGRESS:
                asked[probe] = address
        deadline = now() + _HOST_SECONDS
        while asked and (left := deadline - now()) > 0:
            for probe in select.select([], list(asked), [], left)[1]:
                address = asked.pop(probe)
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                    return address
    return None


def _heard(address: str, port: int) -> str:
    try:
        with socket.create_connection((address, port), timeout=_TRY_SECONDS) as peer:
            peer.settimeout(_TRY_SECONDS)
            return b"".join(iter(lambda: peer.recv(256), b"")).decode(errors="replace")
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
