"""The network interfaces that gloo and NCCL choose on this machine, for connections to other nodes."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dbsp_core.utils.process import environment_value

__all__ = ["GLOO", "NCCL", "Choice", "choice_of_gloo", "choice_of_nccl"]

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables that name interfaces for either."""
_NETWORK = Path("/sys/class/net")
_AVOIDED_BY_NCCL = ("docker", "virbr", "lo")


@dataclass(frozen=True)
class Choice:
    """What a library connects through.

    Attributes:
        usable: Whether other nodes can connect there.
        detail: The choice and its reason.
        fix: What to do if it is not usable.
        misnamed: Whether a variable names an interface that does not exist, so that one node fails, too.
    """

    usable: bool
    detail: str
    fix: str = ""
    misnamed: bool = False


def choice_of_gloo() -> Choice:
    """Returns the interface or address that gloo listens at, and whether other nodes can connect to it."""
    given = environment_value(GLOO)
    if given is not None:
        return _named(GLOO, given.split(","), given.split(","))
    host = socket.gethostname()
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return Choice(False, f"the host name {host} has no address, so gloo listens on loopback", _set(GLOO))
    if ipaddress.ip_address(str(address).partition("%")[0]).is_loopback:
        return Choice(False, f"the host name {host} is {address}, so gloo listens on loopback", _set(GLOO))
    return Choice(True, f"gloo listens at {address}, the address of host name {host}")


def choice_of_nccl() -> Choice:
    """Returns the interfaces that NCCL opens connections through, and whether other nodes can connect to them."""
    here, given = _interfaces(), environment_value(NCCL)
    if given is not None:
        exact, excluding = given.startswith(("=", "^=")), given.startswith("^")
        names = given.lstrip("^=").split(",")
        fits = [any(one == name if exact else one.startswith(name) for name in names) for one in here]
        return _named(NCCL, [given], [one for one, fit in zip(here, fits, strict=True) if fit is not excluding])
    others = [one for one in here if not one.startswith(_AVOIDED_BY_NCCL)]
    best = [one for one in others if one.startswith("ib")] or others
    if not best:
        return Choice(False, f"NCCL finds no interface to other nodes, only {', '.join(here)}", _set(NCCL))
    return Choice(True, f"NCCL takes {', '.join(best)}")


def _named(variable: str, given: Sequence[str], names: Sequence[str]) -> Choice:
    """The choice that a variable makes, which is given as it is written, and names interfaces."""
    here = _interfaces()
    unknown = [name for name in names if name not in here]
    if unknown or not names:
        wrong = f"{variable}={','.join(given)} names {'no interface' if not unknown else ', '.join(unknown)}"
        return Choice(False, f"{wrong}; here are {', '.join(here)}", _set(variable), misnamed=True)
    if all(name == "lo" for name in names):
        return Choice(False, f"{variable}={','.join(given)} is loopback", _set(variable))
    return Choice(True, f"{', '.join(names)} ({variable})")


def _set(variable: str) -> str:
    example = next((one for one in _interfaces() if not one.startswith(_AVOIDED_BY_NCCL)), "eth0")
    return f"for several nodes, set {variable} on each to the interface of their common network, such as {example}"


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex() if not _down(name)]


def _down(name: str) -> bool:
    try:
        return (_NETWORK / name / "operstate").read_text(encoding="utf-8").strip() == "down"
    except OSError:  # not Linux
        return False
