"""Ports of MOCK workers, theirs also while they are down."""

import socket


def reserved_port() -> socket.socket:
    """A port on which connections are refused until somebody here listens on it.

    No other program can have it before the socket is closed: a worker that was stopped finds its
    port free, and whoever calls it meanwhile finds nobody.
    """
    place = socket.socket()
    # Without it nobody here could listen on the port either.
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", 0))
    return place
