"""The network interface of this machine over which the other machines are reached.

gloo takes the address of the host's name, or 127.0.0.1 where that name means nothing;
other machines cannot reach that one (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp,
createDefaultDevice). Then the interface of the route to rank 0 is the right one.
"""

from __future__ import annotations

import socket

import psutil

from bigmodel.running.environment import Process, set_variables, variable

_NAME = "GLOO_SOCKET_IFNAME"


def choose_interface(process: Process) -> None:
    """Tell gloo which interface to use, where it would take one of this machine alone.

    The user's own choice stands.
    """
    one_machine = process.local_world_size == process.world_size
    if (
        one_machine
        or variable(_NAME)
        or _is_reachable(_address_of(socket.gethostname()))
    ):
        return
    interface = _interface_towards(process.master_address, process.master_port)
    if interface is not None:
        set_variables({_NAME: interface})


def _address_of(host: str) -> str | None:
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
    except OSError:
        return None


def _is_reachable(address: str | None) -> bool:
    """Whether an address is one of this machine's that others may know."""
    if address is None or address.startswith("127."):
        return False
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _interface_towards(host: str, port: int) -> str | None:
    """Return the interface of the route to a host; None: the machine's own or none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
        except OSError:
            return None
        mine = probe.getsockname()[0]
    if mine.startswith("127."):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == mine for address in addresses):
            return name
    return None
