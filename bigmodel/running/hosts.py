"""Starting `bigmodel run` on the machines of a host file, over ssh.

A host file has a line per machine, as those of DeepSpeed and Horovod: `HOST slots=N`,
where N processes may run. All machines see the script and the plan at the same paths.
"""

from __future__ import annotations

import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from bigmodel.errors import UsageError, Violation, WorldError
from bigmodel.plans import Plan
from bigmodel.running.environment import visible_devices

_GRACE_SECONDS = 20.0
"""How long the other hosts may take to end by themselves after one has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine of a host file."""

    name: str
    slots: int
    """How many processes may run there."""


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Return the machines of a host file, in its order.

    Raises:
        UsageError: There is no such file, or lines that say no host; all of them.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(
            f"cannot read the host file {str(path)!r}: {error.strerror}"
        ) from None
    hosts: list[Host] = []
    violations: list[Violation] = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        name, slots = words[0], re.fullmatch(r"slots=([1-9]\d*)", " ".join(words[1:]))
        if slots is None:
            rule = "a line is a host and its number of processes: HOST slots=8"
        elif name in [host.name for host in hosts]:
            rule = f"{name} is there twice"
        else:
            hosts.append(Host(name=name, slots=int(slots[1])))
            continue
        violations.append(Violation(field=f"{path}:{number}", got=line, rule=rule))
    if not hosts and not violations:
        violations.append(Violation(field=str(path), got="", rule="it names no host"))
    if violations:
        raise UsageError(violations)
    return tuple(hosts)


def ssh_commands(
    hosts: Sequence[Host],
    plan: Plan,
    words: Sequence[str],
    *,
    ssh: str = "ssh",
    variables: Sequence[str] = (),
    master_address: str | None = None,
    master_port: int | None = None,
) -> Mapping[str, list[str]]:
    """Return the command for every machine.

    As few machines take part as have slots for the plan's processes, the first ones.

    Args:
        hosts: The machines.
        plan: Says how many processes there are.
        words: Of `bigmodel run`: script, plan and its arguments after `--`.
        ssh: The program and the options for every call: `ssh -p 2222 -l user`.
        variables: `NAME=VALUE` for every process.
        master_address: Of the first machine; its name when None.
        master_port: A free one there; derived at random when None.

    Raises:
        WorldError: There are too few slots, they are not equally many, or
            CUDA_VISIBLE_DEVICES is set here, where it says nothing about the others.
    """
    used: list[Host] = []
    while sum(host.slots for host in used) < plan.world and len(used) < len(hosts):
        used.append(hosts[len(used)])
    violations = []
    if sum(host.slots for host in used) < plan.world:
        violations.append(
            Violation(
                field="slots of all hosts",
                got=sum(host.slots for host in used),
                rule=f"the plan is for {plan.world} processes ({plan.describe()})",
                cure="name more hosts, or plan again",
            )
        )
    elif any(host.slots * len(used) < plan.world for host in used) or (
        plan.world % len(used)
    ):
        violations.append(
            Violation(
                field="slots",
                got=", ".join(f"{host.name}: {host.slots}" for host in used),
                rule=f"every host runs as many of the {plan.world} processes as the "
                "others",
                cure="give them equal slots",
            )
        )
    named = [word for word in variables if word.startswith("CUDA_VISIBLE_DEVICES=")]
    if visible_devices() is not None and not named:
        violations.append(
            Violation(
                field="CUDA_VISIBLE_DEVICES",
                got=visible_devices(),
                rule="it is set on this machine and says nothing about the others",
                cure="say it for all: --env CUDA_VISIBLE_DEVICES=0,1; or unset it",
            )
        )
    if violations:
        raise WorldError(violations)
    first = used[0].name.rpartition("@")[2]
    address = master_address or first
    # From a range that systems do not hand out by themselves.
    port = master_port or random.SystemRandom().randrange(20000, 32000)
    script, *rest = words
    commands = {}
    for index, host in enumerate(used):
        run = [*("env", *variables), sys.executable, "-m", "bigmodel.cli.main"]
        run += ["run", script, "--nodes", str(len(used)), "--node-rank", str(index)]
        run += ["--master-addr", address, "--master-port", str(port), *rest]
        remote = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(run)}"
        # A terminal, so that the processes there end when the connection does; never
        # a question for a password, which nobody would see.
        options = ["-tt", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30"]
        commands[host.name] = [*shlex.split(ssh), *options, host.name, remote]
    return commands


def run_on_hosts(commands: Mapping[str, Sequence[str]]) -> int:
    """Run the commands at once and wait; when one fails, all are ended.

    Returns:
        0, or the exit code of the first that failed; its host is named on stderr.
    """
    before = {
        number: signal.signal(number, _interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    running = {
        host: subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for host, command in commands.items()
    }
    readers = [
        threading.Thread(target=_relay, args=(process.stdout,), daemon=True)
        for process in running.values()
    ]
    for reader in readers:
        reader.start()
    failed: dict[str, int] = {}
    deadline = float("inf")
    try:
        while any(process.poll() is None for process in running.values()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
            if not failed:
                failed = _failed(running)
                deadline = time.monotonic() + _GRACE_SECONDS if failed else deadline
        failed = failed or _failed(running)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
        for reader in readers:
            reader.join(timeout=5)
        for number, handler in before.items():
            signal.signal(number, handler)
    for host, code in failed.items():
        reason = " (ssh could not reach it, or lost it)" if code == 255 else ""
        print(
            f"error: host {host} failed with exit code {code}{reason}",
            file=sys.stderr,
            flush=True,
        )
        return code if code > 0 else 128 - code
    return 0


def _failed(running: Mapping[str, subprocess.Popen[str]]) -> dict[str, int]:
    return {host: code for host, process in running.items() if (code := process.poll())}


def _interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _relay(source: IO[str] | None) -> None:
    """Print what a host says; terminals end their lines in two characters."""
    for line in source or ():
        print(line.rstrip("\r\n"), flush=True)
