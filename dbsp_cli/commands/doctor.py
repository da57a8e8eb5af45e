"""`dbsp doctor`: what works on this machine, and what is missing."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from dbsp_cli.output import JsonFlag, print_json, print_tables, text_table
from dbsp_core.utils.errors import UserError
from dbsp_kernels import KERNELS, available, explain_auto

__all__ = ["Check", "doctor_command", "run_checks"]


def doctor_command(as_json: JsonFlag = False) -> None:
    """Say what works on this machine, what is missing, and the fix."""
    checks = run_checks()
    if as_json:
        print_json(findings=[asdict(one) for one in checks])
        return
    names = ("what", "state", "", "fix")
    rows = [(one.what, "ok" if one.ok else "missing", one.detail, one.fix) for one in checks]
    print_tables([text_table(names, rows, title="db-SP on this machine", left=names)])


@dataclass(frozen=True)
class Check:
    """One thing looked at. `fix` says what to do where it is not ok."""

    what: str
    ok: bool
    detail: str
    fix: str = ""


def run_checks() -> list[Check]:
    """Versions, devices, communication, kernels and hosts. Imports none of the hosts."""
    return [
        Check("python", True, platform.python_version()),
        *(_package(name, "needed by db-SP itself; pip install dbsp-attention") for name in ("torch", "numpy")),
        _device(),
        _communication(),
        *_kernels(),
        _package("triton", "pip install 'dbsp-attention[gpu]' on a machine with an NVIDIA GPU"),
        _host("xDiT (dbsp-xdit, xdit --sp-backend dbsp)", ("xfuser", "diffusers", "transformers"), "xdit"),
        _host("ParaAttention (dbsp_para)", ("para_attn", "diffusers", "transformers"), "para"),
        _package("imageio-ffmpeg", "writes mp4 files; pip install 'dbsp-attention[xdit]'"),
        _package("matplotlib", "draws balance.png; pip install 'dbsp-attention[xdit]'"),
    ]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _package(name: str, fix: str) -> Check:
    found = _version(name)
    return Check(name, found is not None, found or "not installed", "" if found else fix)


def _device() -> Check:
    if not torch.accelerator.is_available():
        return Check(
            "accelerator", False, "none: gloo on the CPU, for trying out", "for speed, run where there are GPUs"
        )
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else torch.accelerator.current_accelerator()
    return Check("accelerator", True, f"{torch.accelerator.device_count()} × {name}")


def _communication() -> Check:
    present = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available} if dist.is_available() else {}
    backends = [name for name, is_there in present.items() if is_there()]
    fix = "" if backends else "install a torch with gloo or NCCL"
    return Check("communication", bool(backends), ", ".join(backends) or "none", fix)


def _kernels() -> list[Check]:
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    usable = available(device, dtype)
    findings = []
    for name, kernel in KERNELS.items():
        reason = kernel.why_unsupported(device, dtype)
        fix = "" if reason is None else f"use {' or '.join(usable)}"
        findings.append(Check(f"kernel {name}", reason is None, reason or "serves this machine", fix))
    try:
        return [*findings, Check("kernel auto", True, explain_auto(device, dtype))]
    except UserError as error:  # $DBSP_KERNEL names one that cannot
        return [*findings, Check("kernel auto", False, str(error), f"set DBSP_KERNEL to {' or '.join(usable)}")]


def _host(what: str, modules: tuple[str, ...], extra: str) -> Check:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        return Check(what, False, f"lacks {', '.join(missing)}", f"pip install 'dbsp-attention[{extra}]'")
    return Check(what, True, ", ".join(f"{name} {_version(name.replace('_', '-'))}" for name in modules))
