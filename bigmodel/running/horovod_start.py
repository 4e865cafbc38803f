"""Telling Horovod who is who, under launchers that are not its own.

Horovod reads its environment when it starts. `horovodrun` writes ranks and the address
of a rendezvous there. Under other launchers rank 0 serves that rendezvous itself, on
one machine; over several, only `horovodrun` knows the network interfaces.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from bigmodel.errors import UsageError, Violation, WorldError
from bigmodel.plans import Plan
from bigmodel.running.environment import Process, set_variables
from bigmodel.running.rendezvous import Membership
from bigmodel.units import MIB

_started: dict[str, Any] = {}
# The fusion threshold that this process started Horovod with, and the server it runs.


def start_horovod(plan: Plan, process: Process, member: Membership) -> None:
    """Set the variables that `hvd.init()` reads, where the plan is for Horovod.

    Does nothing for other plans, and where Horovod is not installed, which its engine
    says.

    Args:
        plan: Says the fusion threshold.
        process: What the environment says about this process.
        member: Its rank in the job, and the store of the job.

    Raises:
        WorldError: The processes are on several machines, without `horovodrun`.
        UsageError: Horovod runs already, with another fusion buffer.
    """
    if plan.backend != "horovod" or find_spec("horovod") is None:
        return
    threshold = plan.horovod.fusion_megabytes
    if _started:
        if _started["threshold"] != threshold:
            raise UsageError(
                Violation(
                    field="horovod.fusion_megabytes",
                    got=threshold,
                    rule="this process has started Horovod with "
                    f"{_started['threshold']:g}, and it keeps that",
                    cure="use a process of its own for every value",
                )
            )
        return
    set_variables({"HOROVOD_FUSION_THRESHOLD": str(int(threshold * MIB))})
    _started["threshold"] = threshold
    if process.launcher == "horovodrun" or member.world == 1:
        return
    if process.local_world_size not in (None, member.world):
        raise WorldError(
            "plans of backend 'horovod' over several machines must be started with "
            "horovodrun, which finds the network interfaces that they share; "
            "bigmodel export PLAN --to horovod writes the command"
        )
    port_key = "horovod/port"
    if member.rank == 0:
        member.store.set(port_key, str(_serve_rendezvous(member.world)))
    port = member.store.get(port_key).decode()
    set_variables(
        {
            "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_RANK": str(member.rank),
            "HOROVOD_SIZE": str(member.world),
            "HOROVOD_LOCAL_RANK": str(member.rank),
            "HOROVOD_LOCAL_SIZE": str(member.world),
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
            "HOROVOD_GLOO_IFACE": "lo" if sys.platform == "linux" else "lo0",
        }
    )


def _serve_rendezvous(world: int) -> int:
    """Serve the rendezvous from a thread of this process, and return its port."""
    hosts = import_module("horovod.runner.common.util.hosts")
    server = import_module("horovod.runner.http.http_server").RendezvousServer()
    port = server.start()
    slots = hosts.get_host_assignments(hosts.parse_hosts(f"localhost:{world}"), world)
    server.init(slots)
    _started["server"] = server
    return port
