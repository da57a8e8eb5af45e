"""A pytest plugin: another project's test suite, unchanged, with db-SP or stock.

Read from the environment, since suites start processes of their own:
    DBSP_UPSTREAM           "dbsp" or "stock"
    DBSP_UPSTREAM_SUITE     whose tests they are: "diffusers", "para-attn" or "xfuser"
    DBSP_UPSTREAM_OUTPUTS   a file for what models returned, to compare two runs
    DBSP_UPSTREAM_COUNTED   see `counting`
    DBSP_UPSTREAM_STRATEGY  see `switch`
Each test starts from the same seed. Under torchrun all ranks run the suite together, and each model over all of them.
"""

from __future__ import annotations

import datetime
import os
import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from scripts.checks.upstream.switch import Outputs, install, known_classes

PATIENCE = datetime.timedelta(seconds=60)
if os.environ.get("DBSP_UPSTREAM_SUITE") == "diffusers":
    import diffusers  # noqa: F401  the one that is installed: the suite's conftest.py puts its own sources first

enabled = os.environ.get("DBSP_UPSTREAM") == "dbsp"
outputs = Outputs()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    from scripts.checks.upstream import on_cpu

    if "RANK" in os.environ:
        if os.environ["RANK"] != "0":
            config.option.xmlpath = None  # the report is rank 0's
        dist.init_process_group("gloo", timeout=PATIENCE)
        config.add_cleanup(dist.destroy_process_group)
    match os.environ["DBSP_UPSTREAM_SUITE"]:
        case "diffusers":
            sys.path[:] = [path for path in sys.path if path != str(config.rootpath / "src")]  # ranks inherit it
            config.add_cleanup(install(known_classes(), enabled, outputs))
        case "xfuser":
            on_cpu.prepare_xfuser(enabled)
        case "para-attn":
            on_cpu.prepare_para()
            if enabled:
                from scripts.checks.upstream.para_functions import replace_functions

                replace_functions()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    outputs.test = item.nodeid
    if "RANK" not in os.environ:
        os.environ.pop("MASTER_PORT", None)  # para-attn's tests would take the last one's again, which may be busy
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return (yield)


def pytest_sessionfinish() -> None:
    file = os.environ.get("DBSP_UPSTREAM_OUTPUTS")
    if file and os.environ.get("RANK", "0") == "0":
        torch.save(outputs.values, file)
