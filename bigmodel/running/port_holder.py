"""Who listens at a port of this machine: the first question after `address in use`."""

from __future__ import annotations

import psutil

_COMMAND_CHARACTERS = 120


def why_not(port: int, error: Exception) -> str:
    """Return why nobody can listen at a port, from the error of who tried."""
    if "EADDRINUSE" in str(error):
        return f"{_holder(port)} does"
    return str(error).splitlines()[0]


def _holder(port: int) -> str:
    """Return the process that listens at a TCP port, for a message.

    Returns:
        `process 4711 (python train.py)`; what to call where the system does not tell.
    """
    try:
        listening = [
            connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr[1:] == (port,)
        ]
        for pid in listening:
            if pid is not None:
                command = " ".join(psutil.Process(pid).cmdline()).replace("\n", " ")
                return f"process {pid} ({command[:_COMMAND_CHARACTERS]})"
    except psutil.Error:
        pass  # another user's process: the system tells only root
    return f"another process (sudo ss -ltnp 'sport = :{port}' names it)"
