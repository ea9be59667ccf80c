"""Ports for the servers of tests."""

import random
import socket


def free_port() -> int:
    """Return a port that is free, and the next one too, on which a job's nodes meet.

    The kernel gives others to connections and to whoever asks for any: a port of its own choice may be taken by the
    time that a process listens there.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000, 2)  # pytest-randomly seeds the ordinary generator
        try:
            with socket.create_server(("", port)), socket.create_server(("", port + 1)):
                return port
        except OSError:
            continue
