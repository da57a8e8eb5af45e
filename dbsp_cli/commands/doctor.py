"""`dbsp doctor`: checks what works on this machine and what is missing."""

from __future__ import annotations

import importlib.util
import ipaddress
import platform
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points

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
    """Show what works on this machine, what is missing, and the fix."""
    with Console(stderr=True).status("importing what is installed"):  # on a terminal
        checks = run_checks()
    if as_json:
        print_json(verdict=verdict(checks), findings=[asdict(check) | {"ok": check.ok} for check in checks])
        return
    rows = [(check.state, check.what, "; ".join(filter(None, (check.detail, check.fix)))) for check in checks]
    print(verdict(checks), end="\n\n")
    print_tables([TextTable("", ("state", "what", "detail"), rows, left=("state", "what", "detail"))])


@dataclass(frozen=True)
class Check:
    """Result of one check, with the fix if it is not ok."""

    what: str
    state: str  # "ok", "missing", or "not here" if installing something would not help
    detail: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        return self.state == "ok"


@dataclass(frozen=True)
class Importable:
    """A check that imports packages in a separate process."""

    what: str
    needs: tuple[str, ...]  # import names of packages
    extra: str  # extra of dbsp-attention that installs them
    code: str = ""  # code to import them; default: import all
    use: str = ""

    def check(self) -> Check:
        fix = "; ".join(filter(None, (self.use, install_command(self.extra))))
        lacking = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if lacking:
            return Check(self.what, "missing", f"lacks {', '.join(lacking)}", fix)
        code = self.code or f"import {', '.join(self.needs)}"
        code = f"import sys; sys.path[:] = filter(None, sys.path)\n{code}"  # without the current folder
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
        "from dbsp_xdit.runner import install; install(); import xfuser.runner, dbsp_xdit.attachment",
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
ENGINES = (
    ("vLLM-Omni", "vllm_omni.general_plugins", vllm_omni_plugin.EXPECTED),
    ("SGLang Diffusion", "sglang.multimodal_gen.plugins", sglang.EXPECTED),
    ("LightX2V", "lightx2v.platform_plugins", lightx2v.EXPECTED),
)
"""Serving engines with plug-ins: name, entry-point group, and the plug-in's expected host."""
GLOO = "GLOO_SOCKET_IFNAME"  # environment variable with gloo's network interface to other nodes


def run_checks() -> list[Check]:
    """Checks versions, devices, communication, kernels, frameworks and engines."""
    with ThreadPoolExecutor() as threads:
        imported = list(threads.map(Importable.check, (*FRAMEWORKS, *_PACKAGES)))
    versions = [("python", platform.python_version()), *((name, _version(name)) for name in ("torch", "numpy"))]
    return [
        Check("db-SP", "ok", own_version()),
        *(Check(name, "ok", version) for name, version in versions),
        _accelerator(),
        _communication(),
        _between_nodes(),
        *imported,
        *(_engine(*engine) for engine in ENGINES if installed_version(engine[2].package)),
        *_kernels(),
    ]


def verdict(checks: list[Check]) -> str:
    by_name = {check.what: check for check in checks}
    frameworks = [framework.what for framework in FRAMEWORKS if by_name[framework.what].ok]
    device = by_name["accelerator"]
    where = device.detail if device.ok else "no GPU, on the CPU only for trying out"
    if frameworks:
        return f"db-SP {own_version()} runs in {', '.join(frameworks)}; {where}"
    return f"db-SP {own_version()} can plan; to generate, {install_command('diffusers')}"


def own_version() -> str:
    return _version("dbsp-attention")


def _version(name: str) -> str:
    return installed_version(name.replace("_", "-")) or "of unknown version: not installed by pip"


def _accelerator() -> Check:
    if not torch.accelerator.is_available():
        detail, fix = "gloo on the CPU, for trying out", "for speed, run on GPUs"
        return Check("accelerator", "not here", detail, fix)
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else torch.accelerator.current_accelerator()
    return Check("accelerator", "ok", f"{torch.accelerator.device_count()} × {name}")


def _communication() -> Check:
    present = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available} if dist.is_available() else {}
    backends = ", ".join(name for name, is_there in present.items() if is_there())
    if backends:
        return Check("communication", "ok", backends)
    return Check("communication", "missing", "none", "install a torch with gloo or NCCL")


def _between_nodes() -> Check:
    """Checks that gloo, without GLOO_SOCKET_IFNAME, listens at an address that other nodes can reach."""
    interface, host, title = environment_value(GLOO), socket.gethostname(), "gloo between nodes"
    if interface is not None:
        return Check(title, "ok", f"{GLOO}={interface}")
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        address = ""
    if address and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return Check(title, "ok", f"gloo listens at {address}, the address of {host}")
    detail = f"the host name {host} is {address or 'unknown'}, so gloo listens on loopback"
    fix = f"for several nodes, set {GLOO} on each to their common network's interface, such as eth0"
    return Check(title, "not here", detail, fix)


def _engine(what: str, group: str, expected: ExpectedHost) -> Check:
    """Checks that an installed engine finds db-SP's plug-in."""
    problem, _, fix = (expected.problem() or "").partition("; ")
    if "dbsp" not in {entry.name for entry in entry_points(group=group)}:
        fix = "install dbsp-attention again, so that pip writes its entry points"
        problem = f"{installed_version(expected.package)}, which does not see db-SP"
    if problem:
        return Check(what, "missing", problem, fix)
    return Check(what, "ok", f"{installed_version(expected.package)}, sees db-SP")


def _kernels() -> list[Check]:
    """Checks each kernel, and shows which one `kernel: auto` chooses and why."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    usable = " or ".join(available(device, dtype))
    checks = []
    for name, kernel in KERNELS.items():
        reason, _, fix = (kernel.why_unsupported(device, dtype) or "").partition("; ")
        if not reason:
            checks.append(Check(f"kernel {name}", "ok", "supported here"))
        elif device in kernel.devices:
            checks.append(Check(f"kernel {name}", "missing", reason, fix or f"kernel {usable} is used instead"))
        else:
            reason = "needs a GPU" if device == "cpu" else "is for the CPU"
            checks.append(Check(f"kernel {name}", "not here", reason, f"kernel {usable} is used instead"))
    set_name = environment_value("DBSP_KERNEL")
    try:
        order = kernel_order("auto", None, torch.device(device))
        chosen = choose_kernel(order, device, dtype).name
    except UserError as error:
        fix = "unset DBSP_KERNEL" if set_name else "see the line of kernel triton"
        return [*checks, Check("kernel auto", "missing", str(error), fix)]
    why = f"because DBSP_KERNEL={set_name}" if set_name else f"the first that supports {dtype} on {device}"
    why = why if order == "auto" else "as dbsp bench has measured"
    return [*checks, Check("kernel auto", "ok", f"{chosen}, {why}")]
