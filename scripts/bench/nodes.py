"""Two nodes on one machine: network namespaces with a slow link between them. Needs root and the commands ip and tc.

Frames carry 64 kB, so that headers are a thousandth of what is sent.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NODES = 2


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """What `run_on_two_nodes` starts a rank with: its number, the name of its node's link, and a file to meet at."""
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--link", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)


def run_on_two_nodes(module: str, rate: str, ranks_per_node: int, *options: str) -> str:
    """Starts `python -m module OPTIONS` for each rank, with those of `add_rank_options` and --ranks-per-node.

    rate: of the link, as tc writes it. Returns what rank 0 printed; raises RuntimeError where a rank failed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the namespaces go
    with _two_nodes(rate) as links, tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(NODES * ranks_per_node):
            name, link = links[rank // ranks_per_node]
            program = ["ip", "netns", "exec", name, sys.executable, "-m", module, *options]
            own = {"--rank": rank, "--ranks-per-node": ranks_per_node, "--link": link, "--store": f"{folder}/store"}
            command = [*program, *(str(word) for pair in own.items() for word in pair)]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        try:
            answers = [rank.communicate(timeout=600)[0] for rank in ranks]
        finally:
            for process in ranks:
                process.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("a rank failed; its error is above")
    return answers[0]


def sent_bytes(link: str) -> float:
    """What the kernel has counted on a link, in the direction away from this node."""
    return float(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text(encoding="utf-8"))


@contextmanager
def _two_nodes(rate: str) -> Iterator[list[tuple[str, str]]]:
    """(namespace, its end of the link) of both, gone afterwards."""
    names = [f"dbsp{os.getpid()}n{node}" for node in range(NODES)]
    links = [f"dbv{os.getpid() % 100000}n{node}" for node in range(NODES)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(
            "ip",
            "link",
            "add",
            links[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            links[1],
            "netns",
            names[1],
        )
        for node, (name, link) in enumerate(zip(names, links, strict=True)):
            _run("ip", "-n", name, "addr", "add", f"10.213.78.{node + 1}/24", "dev", link)
            _run("ip", "-n", name, "link", "set", link, "mtu", "65000", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            shape = ("rate", rate, "burst", "256kb", "latency", "400ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", "tbf", *shape)
        yield list(zip(names, links, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"this machine allows no two nodes: {' '.join(command)}: {done.stderr.strip()}")
