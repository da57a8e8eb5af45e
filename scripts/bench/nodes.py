"""Ranks on two nodes of one machine: network namespaces with a slow link between them. Needs root, ip and tc."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.nodes import two_nodes

NODES = 2


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Adds a rank's options: its number, the name of its node's link, and a file to meet at."""
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--link", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)


def run_on_two_nodes(module: str, rate: str, ranks_per_node: int, *options: str) -> str:
    """Starts `python -m module OPTIONS` for each rank, with those of `add_rank_options` and --ranks-per-node.

    rate: of the link, as tc writes it. Returns what rank 0 printed; raises RuntimeError where a rank failed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the namespaces go
    with two_nodes(rate) as (nodes, what), tempfile.TemporaryDirectory() as folder:
        if not all(node.prefix for node in nodes):
            raise SystemExit(f"two nodes need network namespaces; there is {what}")
        ranks = []
        for rank in range(NODES * ranks_per_node):
            node = nodes[rank // ranks_per_node]
            link = node.environment["GLOO_SOCKET_IFNAME"]
            own = {"--rank": rank, "--ranks-per-node": ranks_per_node, "--link": link, "--store": f"{folder}/store"}
            words = (str(word) for pair in own.items() for word in pair)
            command = [*node.prefix, sys.executable, "-m", module, *options, *words]
            environment = {**os.environ, **node.environment, "OMP_NUM_THREADS": "1"}
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
    """Returns what the kernel has counted on a link, in the direction away from this node."""
    return float(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text(encoding="utf-8"))
