"""The launchers of a job's machines, one on each, and what they tell each other.

Node 0 serves the store; the ranks use it too. Every launcher writes that it came, that
it lives, and how its processes ended, so that all end soon, with the same exit code,
when one of them fails or falls silent.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch.distributed as dist
from torch.distributed import (
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from bigmodel.errors import UsageError, Violation, WorkerError, WorldError
from bigmodel.running.port_holder import why_not

_BEAT_SECONDS = 1.0
_SILENCE_SECONDS = 60.0
"""A launcher that has written nothing for so long is taken for lost."""
_GRACE_SECONDS = 10.0
"""How long node 0 keeps the store for launchers that have yet to read the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine among those of a job: the one where the launcher runs."""

    count: int = 1
    index: int = 0
    master_address: str = "localhost"
    """Machine of node 0."""
    master_port: int = 0
    """Port at which node 0 listens; 0: any free one, which one node alone can take."""

    def __post_init__(self) -> None:
        """Refuse what can never be right."""
        violations = []
        if self.count < 1:
            violations.append(
                Violation(field="nodes", got=self.count, rule="there is at least one")
            )
        elif not 0 <= self.index < self.count:
            violations.append(
                Violation(
                    field="node rank",
                    got=self.index,
                    rule=f"{self.count} nodes have the ranks 0 to {self.count - 1}",
                )
            )
        if self.count > 1 and not self.master_port:
            violations.append(
                Violation(
                    field="master port",
                    got=self.master_port,
                    rule="the nodes must know beforehand where they meet",
                    cure="give all of them the same free port of node 0",
                )
            )
        if violations:
            raise UsageError(violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the processes of a node ended."""

    code: int
    """Exit code; 0 is success."""
    text: str = ""
    """What happened, in one line."""


@final
class Meeting:
    """The launcher of this node among those of the job.

    Args:
        node: This machine.
        digest: Of the plan, which must be the same on all.
        timeout: Seconds to wait for the other nodes.

    Raises:
        WorldError: The port is in use, or the plans differ.
        WorkerError: A node never came.
    """

    def __init__(self, node: Node, digest: str, timeout: float) -> None:
        self._node = node
        self._hosts = [socket.gethostname()] * node.count
        self._beats: dict[int, tuple[int, float]] = {}
        self._last_beat = 0.0
        self._store = _open(node, timeout)
        self.port: int = self._store.port
        """Where the store listens."""
        self.job = self._agree_on_name()
        """Name of the job, unlike that of any other."""
        self._call_roll(digest, timeout)

    def trouble(self) -> Ending | None:
        """Return how another node failed; None while all is well. Never waits long."""
        now = time.monotonic()
        if self._node.count == 1 or now - self._last_beat < _BEAT_SECONDS:
            return None
        self._last_beat = now
        try:
            self._store.add(f"alive/{self._node.index}", 1)
            for other in self._others():
                if (ending := self._ending(other)) is not None:
                    if ending.code:
                        return ending
                    continue
                count = self._store.add(f"alive/{other}", 0)
                if count != self._beats.get(other, (-1, 0.0))[0]:
                    self._beats[other] = (count, now)
                elif now - self._beats[other][1] > _SILENCE_SECONDS:
                    return Ending(
                        code=1,
                        text=f"{self._name(other)} has been silent for "
                        f"{_SILENCE_SECONDS:g} s",
                    )
        except (dist.DistError, RuntimeError):
            return Ending(
                code=1,
                text=f"{self._name(0)}, which serves the job's store, has ended",
            )
        return None

    def end(self, ending: Ending) -> Ending:
        """Tell the others how this node ended, and wait until all have ended.

        Returns:
            The first failure, the same on every node that is still there.
        """
        me = self._node.index
        if self._node.count == 1:
            return ending
        try:
            text = json.dumps([ending.code, ending.text])
            # The first one to fail decides; what follows is a consequence.
            if ending.code and self._store.add("failures", 1) == 1:
                self._store.set("failure", text)
            self._store.set(f"ended/{me}", text)
            while not ending.code and not all(map(self._ending, self._others())):
                if (trouble := self.trouble()) is not None:
                    ending = trouble
                    break
                time.sleep(0.1)
            self._store.set(f"left/{me}", "")
            if me == 0:
                self._linger()
            if ending.code and self._store.check(["failure"]):
                code, words = json.loads(self._store.get("failure"))
                return Ending(code=code, text=words)
        except (dist.DistError, RuntimeError):
            pass  # node 0 has gone with the store: there is nobody to tell
        return ending

    def where(self) -> str:
        """Return this node's name for messages; empty when it is the only one."""
        return "" if self._node.count == 1 else f" on {self._name(self._node.index)}"

    def _agree_on_name(self) -> str:
        if self._node.index == 0:
            self._store.set("job", uuid.uuid4().hex[:8])
        try:
            return self._store.get("job").decode()
        except (dist.DistError, RuntimeError):
            raise WorkerError(
                f"what listens at {self._node.master_address}:{self.port} is not node "
                "0 of this job; look at node 0's output, or give another port"
            ) from None

    def _call_roll(self, digest: str, timeout: float) -> None:
        node = self._node
        if self._store.add(f"came/{node.index}", 1) > 1:
            raise WorldError(
                f"node {node.index} is there twice: give every node a rank of its own, "
                "and every job a port"
            )
        keys = [f"node/{index}" for index in range(node.count)]
        self._store.set(keys[node.index], json.dumps([self._hosts[0], digest]))
        deadline = time.monotonic() + timeout
        try:
            while not self._store.check(keys):
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(0.05)
        except (dist.DistError, RuntimeError, TimeoutError):
            raise WorkerError(self._missing(keys, timeout)) from None
        came = [json.loads(self._store.get(key)) for key in keys]
        self._hosts = [host for host, _ in came]
        others = [i for i, (_, other) in enumerate(came) if other != came[0][1]]
        if others:
            raise WorldError(
                f"the plans differ: {', '.join(map(self._name, others))} read another "
                f"plan than {self._name(0)}; give the same plan file to every node"
            )

    def _missing(self, keys: list[str], timeout: float) -> str:
        waited = (
            f"node {self._node.index} ({self._hosts[0]}) waited {timeout:g} s at "
            f"{self._node.master_address}:{self.port}"
        )
        try:
            gone = [
                str(i) for i, key in enumerate(keys) if not self._store.check([key])
            ]
        except (dist.DistError, RuntimeError):
            gone = ["0"]
        label = "node" if len(gone) == 1 else "nodes"
        return (
            f"{label} {', '.join(gone)} of {len(keys)} never came: {waited}; start "
            "bigmodel run there too, with its --node-rank, or raise --join-timeout"
        )

    def _others(self) -> list[int]:
        return [i for i in range(self._node.count) if i != self._node.index]

    def _ending(self, index: int) -> Ending | None:
        if not self._store.check([f"ended/{index}"]):
            return None
        code, text = json.loads(self._store.get(f"ended/{index}"))
        return Ending(code=code, text=text)

    def _linger(self) -> None:
        deadline = time.monotonic() + _GRACE_SECONDS
        keys = [f"left/{index}" for index in self._others()]
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _name(self, index: int) -> str:
        return f"node {index} ({self._hosts[index]})"


def _open(node: Node, timeout: float) -> TCPStore:
    try:
        return TCPStore(
            node.master_address,
            node.master_port,
            is_master=node.index == 0,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except (dist.DistError, RuntimeError) as error:
        port = node.master_port
        if node.index == 0:
            raise WorldError(
                f"node 0 cannot listen at port {port}: {why_not(port, error)}; give "
                "all nodes another one (--master-port)"
            ) from error
        raise WorkerError(
            f"node 0 of {node.count} never came: node {node.index} "
            f"({socket.gethostname()}) waited {timeout:g} s for it at "
            f"{node.master_address}:{port}; start bigmodel run --node-rank 0 there, or "
            "raise --join-timeout"
        ) from error
