"""`dbsp doctor`: what works on this machine, and what is missing."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from dbsp_cli.output import JsonFlag, TextTable, print_json, print_tables
from dbsp_core.cost.machine import kernel_order
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.expected_host import ExpectedHost
from dbsp_core.utils.process import environment_value, installed_version
from dbsp_engines import lightx2v, sglang, vllm_omni_plugin
from dbsp_kernels import KERNELS, available, choose_kernel
from dbsp_kernels.errors import install_command


def doctor_command(as_json: JsonFlag = False) -> None:
    """Say what works on this machine, what is missing, and the fix."""
    with Console(stderr=True).status("importing what is installed"):  # on a terminal
        checks = run_checks()
    if as_json:
        print_json(verdict=verdict(checks), findings=[asdict(one) | {"ok": one.ok} for one in checks])
        return
    rows = [(one.state, one.what, "; ".join(filter(None, (one.detail, one.fix)))) for one in checks]
    print(verdict(checks), end="\n\n")
    print_tables([TextTable("", ("state", "what", "detail"), rows, left=("state", "what", "detail"))])


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        state: "ok", "missing", or "not here" where nothing could be installed to change it.
        fix: Fix if it is not ok.
    """

    what: str
    state: str
    detail: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        return self.state == "ok"


@dataclass(frozen=True)
class Importable:
    """Something that works if it can be imported, which is tried in a process of its own.

    Attributes:
        needs: Packages, by the names they are imported by, whose versions are shown.
        extra: Extra of dbsp-attention that installs them.
        code: Imports what is used of them.
        use: Purpose of the package.
    """

    what: str
    needs: tuple[str, ...]
    extra: str
    code: str = ""
    use: str = ""

    def check(self) -> Check:
        fix = "; ".join(filter(None, (self.use, install_command(self.extra))))
        lacking = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if lacking:
            return Check(self.what, "missing", f"lacks {', '.join(lacking)}", fix)
        code = self.code or f"import {', '.join(self.needs)}"
        code = f"import sys; sys.path[:] = filter(None, sys.path)\n{code}"  # nothing of the current folder
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, errors="replace")
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            return Check(self.what, "missing", f"cannot be imported: {reason}", fix)
        return Check(self.what, "ok", ", ".join(f"{name} {_version(name)}" for name in self.needs))


FRAMEWORKS = (
    Importable(
        "xDiT",
        ("xfuser", "diffusers", "transformers", "triton"),
        "xdit",
        "from dbsp_cli.import_hook import after_import; from dbsp_xdit.runner import install; "
        "install(after_import); import xfuser.runner, dbsp_xdit.attachment",
        "for xdit --sp-backend dbsp",
    ),
    Importable(
        "ParaAttention",
        ("para_attn", "diffusers", "transformers"),
        "para",
        "import dbsp_para.attach, para_attn.context_parallel.diffusers_adapters",
        "for para-attn's parallelize_pipe",
    ),
    Importable(
        "diffusers",
        ("diffusers", "transformers"),
        "diffusers",
        "import dbsp_diffusers; from diffusers import CogVideoXPipeline, WanPipeline",
        "for dbsp generate, dbsp_diffusers and dbsp_para",
    ),
)
_PACKAGES = (
    Importable("triton", ("triton",), "gpu", use="compiles kernels for NVIDIA GPUs"),
    Importable("imageio-ffmpeg", ("imageio_ffmpeg",), "diffusers", use="writes mp4 files"),
    Importable("matplotlib", ("matplotlib",), "diffusers", "import matplotlib.figure", "draws balance.png"),
)


@dataclass(frozen=True)
class Engine:
    """A serving engine that looks for plug-ins itself; nothing is said of one that is not installed.

    Attributes:
        group: Entry points that it loads, db-SP's among them.
        expected: Names of the engine that db-SP's plug-in uses.
    """

    what: str
    group: str
    expected: ExpectedHost

    def check(self) -> Check | None:
        found = installed_version(self.expected.package)
        if found is None:
            return None
        if "dbsp" not in {one.name for one in entry_points(group=self.group)}:
            fix = "install dbsp-attention again, so that pip writes its entry points"
            return Check(self.what, "missing", f"{found}, which does not see db-SP", fix)
        problem, _, fix = (self.expected.problem() or "").partition("; ")
        if problem:
            return Check(self.what, "missing", problem, fix)
        return Check(self.what, "ok", f"{found}, sees db-SP")


ENGINES = (
    Engine("vLLM-Omni", "vllm_omni.general_plugins", vllm_omni_plugin.EXPECTED),
    Engine("SGLang Diffusion", "sglang.multimodal_gen.plugins", sglang.EXPECTED),
    Engine("LightX2V", "lightx2v.platform_plugins", lightx2v.EXPECTED),
)


def run_checks() -> list[Check]:
    """Checks versions, devices, communication, kernels, frameworks and engines. Imports the frameworks that are ok."""
    with ThreadPoolExecutor() as threads:
        imported = list(threads.map(Importable.check, (*FRAMEWORKS, *_PACKAGES)))
    return [
        Check("db-SP", "ok", own_version()),
        Check("python", "ok", platform.python_version()),
        *(Check(name, "ok", _version(name)) for name in ("torch", "numpy")),
        _device(),
        _communication(),
        *_between_nodes(),
        *imported,
        *filter(None, (engine.check() for engine in ENGINES)),
        *_kernels(),
    ]


def verdict(checks: list[Check]) -> str:
    """Returns the one line to read first."""
    state = {one.what: one for one in checks}
    frameworks = [one.what for one in FRAMEWORKS if state[one.what].ok]
    where = state["accelerator"].detail if state["accelerator"].ok else "on the CPU, for trying out: there is no GPU"
    if frameworks:
        return f"db-SP {own_version()} runs in {', '.join(frameworks)}; {where}"
    return f"db-SP {own_version()} can plan; to generate, {install_command('diffusers')}"


def own_version() -> str:
    return _version("dbsp-attention")


def _version(name: str) -> str:
    return installed_version(name.replace("_", "-")) or "of unknown version: not installed by pip"


def _device() -> Check:
    if not torch.accelerator.is_available():
        return Check(
            "accelerator", "not here", "gloo on the CPU, for trying out", "for speed, run where there are GPUs"
        )
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else torch.accelerator.current_accelerator()
    return Check("accelerator", "ok", f"{torch.accelerator.device_count()} × {name}")


def _communication() -> Check:
    present = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available} if dist.is_available() else {}
    backends = [name for name, is_there in present.items() if is_there()]
    if not backends:
        return Check("communication", "missing", "none", "install a torch with gloo or NCCL")
    return Check("communication", "ok", ", ".join(backends))


GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables that name the network interfaces to other nodes."""
_NETWORK = Path("/sys/class/net")
_AVOIDED_BY_NCCL = ("docker", "virbr", "lo")


def _between_nodes() -> list[Check]:
    checks = []
    if dist.is_available() and dist.is_gloo_available():
        given = environment_value(GLOO)
        checks.append(_default_of_gloo() if given is None else _named(GLOO, given, given.split(",")))
    if dist.is_available() and dist.is_nccl_available():
        given = environment_value(NCCL)
        checks.append(_default_of_nccl() if given is None else _named(NCCL, given, _chosen_by_nccl(given)))
    return checks


def _default_of_gloo() -> Check:
    """Checks the address that gloo listens at: that of the host's name."""
    what, host = "gloo between nodes", socket.gethostname()
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return Check(what, "not here", f"the host name {host} has no address, so gloo listens on loopback", _set(GLOO))
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return Check(what, "not here", f"the host name {host} is {address}, so gloo listens on loopback", _set(GLOO))
    return Check(what, "ok", f"gloo listens at {address}, the address of host name {host}")


def _default_of_nccl() -> Check:
    """Checks the interfaces that NCCL takes: InfiniBand's, else any that is not of containers."""
    what, others = "NCCL between nodes", [one for one in _interfaces() if not one.startswith(_AVOIDED_BY_NCCL)]
    best = [one for one in others if one.startswith("ib")] or others
    if not best:
        detail = f"NCCL finds no interface to other nodes, only {', '.join(_interfaces())}"
        return Check(what, "not here", detail, _set(NCCL))
    return Check(what, "ok", f"NCCL takes {', '.join(best)}")


def _chosen_by_nccl(given: str) -> list[str]:
    """Returns the interfaces that NCCL reads from its variable: prefixes, names after "=", all others after "^"."""
    names, exact = tuple(given.lstrip("^=").split(",")), given.startswith(("=", "^="))
    return [
        one for one in _interfaces() if (one in names if exact else one.startswith(names)) is not given.startswith("^")
    ]


def _named(variable: str, given: str, names: Sequence[str]) -> Check:
    """Checks the interfaces that a variable names; one that does not exist makes even a single node fail."""
    what, here = f"{'gloo' if variable == GLOO else 'NCCL'} between nodes", _interfaces()
    unknown = [name for name in names if name not in here]
    if unknown or not names:
        detail = f"{variable}={given} names {', '.join(unknown) or 'no interface'}; here are {', '.join(here)}"
        return Check(what, "missing", detail, _set(variable))
    if all(name == "lo" for name in names):
        return Check(what, "not here", f"{variable}={given} is loopback", _set(variable))
    return Check(what, "ok", f"{', '.join(names)} ({variable})")


def _set(variable: str) -> str:
    example = next((one for one in _interfaces() if not one.startswith(_AVOIDED_BY_NCCL)), "eth0")
    return f"for several nodes, set {variable} on each to the interface of their common network, such as {example}"


def _interfaces() -> list[str]:
    """Returns the network interfaces that are not down."""
    return [name for _, name in socket.if_nameindex() if not _down(name)]


def _down(name: str) -> bool:
    try:
        return (_NETWORK / name / "operstate").read_text(encoding="utf-8").strip() == "down"
    except OSError:  # not Linux
        return False


def _kernels() -> list[Check]:
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    usable = " or ".join(available(device, dtype))
    findings = []
    for name, kernel in KERNELS.items():
        reason, state = kernel.why_unsupported(device, dtype), "missing"
        if reason is None:
            findings.append(Check(f"kernel {name}", "ok", "supported here"))
            continue
        if device not in kernel.devices:
            reason, state = "needs a GPU" if device == "cpu" else "is for the CPU", "not here"
        reason, _, fix = reason.partition("; ")
        findings.append(Check(f"kernel {name}", state, reason, fix or f"kernel {usable} is used instead"))
    try:
        order, set_name = kernel_order("auto", None, torch.device(device)), os.environ.get("DBSP_KERNEL")
        chosen = choose_kernel(order, device, dtype).name
        why = f"because DBSP_KERNEL={set_name}" if set_name else f"the first that supports {dtype} on {device}"
        why = why if order == "auto" else "as dbsp bench has measured"
        findings.append(Check("kernel auto", "ok", f"{chosen}, {why}"))
    except UserError as error:
        fix = "unset DBSP_KERNEL" if os.environ.get("DBSP_KERNEL") else "see the line of kernel triton"
        findings.append(Check("kernel auto", "missing", str(error), fix))
    return findings
