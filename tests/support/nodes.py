"""Two nodes on one machine: each in a network namespace of its own where that is allowed, else both on loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.support.ports import free_port


@dataclass(frozen=True)
class Node:
    """prefix: of a command, so that it runs there;  address: of node 0, seen from here"""

    prefix: list[str]
    address: str
    port: int
    environment: dict[str, str] = field(default_factory=dict)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def two_nodes() -> Iterator[tuple[list[Node], str]]:
    """Yields the nodes, and a description of them."""
    names = [f"dbsp{os.getpid()}n{index}" for index in range(2)]
    links = [f"dbv{os.getpid() % 100000}n{index}" for index in range(2)]
    try:
        separate = _connect(names, links)
        if separate:
            nodes = [
                Node(["ip", "netns", "exec", name], "10.213.77.1", 29517, {"GLOO_SOCKET_IFNAME": link})
                for name, link in zip(names, links, strict=True)
            ]
            yield nodes, "two network namespaces"
        else:
            yield [Node([], "127.0.0.1", free_port())] * 2, "one loopback: this machine allows no network namespaces"
    finally:
        if shutil.which("ip"):
            for name in names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _connect(names: list[str], links: list[str]) -> bool:
    """Makes two namespaces with a cable between them, and returns whether the machine allowed it."""
    if shutil.which("ip") is None:
        return False
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for index, (name, link) in enumerate(zip(names, links, strict=True)):
            _ip("-n", name, "addr", "add", f"10.213.77.{index + 1}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError:
        return False
    return True
