"""Which of other projects' tests are run, and how."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from scripts.checks.upstream.upstream_refs.finding import commit_of

__all__ = ["SUITES", "Suite", "sources_of"]

MODELS = "tests/models/transformers/test_models_transformer_{}.py"
VIDEO = ("wan", "wan_vace", "skyreels_v2", "chronoedit", "cogvideox", "hunyuan_video", "hunyuan_1_5", "ltx")
IMAGE = ("flux", "flux2", "qwenimage", "minimax_h3")
CORE = "not compile and not quantization and not single_file and not tensor_parallel and not context_parallel"
XFUSER = (
    *("cli", "compat", "compile_cudagraph_steps", "determinism_check", "dtype_policy", "envs", "gilbert"),
    *("model_replica_group", "per_model_load_contracts", "ring_flash_attn", "ring_flash_attn_fa3_args"),
    *("runner_load_declarations", "vsa_attention", "vsa_h3_attention", "xfuser_attn"),
)
DIFFUSERS = "https://github.com/huggingface/diffusers"


@dataclass(frozen=True)
class Suite:
    """Some tests of one project.

    package: whose, by its name in the package registry
    tests:   files, from the folder of its sources on
    options: of pytest
    strategy: with two ranks, which run every test together: how they share a sequence; None: one process
    what:    what they are, in a few words
    """

    name: str
    package: str
    tests: tuple[str, ...]
    what: str
    options: tuple[str, ...] = ()
    strategy: str | None = None


def _models(*names: str) -> tuple[str, ...]:
    return tuple(map(MODELS.format, names))


SUITES = (
    Suite("diffusers-video", "diffusers", _models(*VIDEO), "transformers of videos", ("-m", CORE)),
    Suite("diffusers-image", "diffusers", _models(*IMAGE), "transformers of images, MiniMax-H3", ("-m", CORE)),
    *(
        Suite(
            f"diffusers-video-{strategy}",
            "diffusers",
            _models("wan", "cogvideox", "hunyuan_video", "ltx"),
            f"some of them on two ranks, {strategy}",
            ("-m", f"{CORE} and not lora and not memory", "-k", "not save_pretrained and not loading"),
            strategy,
        )
        for strategy in ("U2R1", "U1R2")
    ),
    Suite(
        "diffusers-compile",
        "diffusers",
        _models("wan", "cogvideox"),
        "torch.compile",
        ("-m", "compile and not quantization"),
    ),
    Suite(
        "diffusers-dispatch",
        "diffusers",
        ("tests/models/test_attention_dispatch.py", "tests/models/test_attention_processor.py"),
        "attention backends and processors",
    ),
    Suite(
        "para-attn",
        "para-attn",
        ("tests/test_interface.py",),
        "ring and Ulysses functions and modes, on two gloo ranks; self-attention, not causal, not compiled, bfloat16",
        ("-k", "not True- and 4096-4096 and dtype1", "-o", "addopts=", "-o", "log_cli=false"),
    ),
    Suite(
        "xfuser",
        "xfuser",
        (
            *(f"tests/core/test_{name}.py" for name in XFUSER),
            *("tests/layers", "tests/test_wan_distilled.py", "tests/test_minimax_h3.py"),
            "tests/test_sd3_text_sequence_parallel.py",
        ),
        "attention, command line, runner models; db-SP's patches are installed",
        ("--continue-on-collection-errors", "-o", "addopts=", "-o", "log_cli=false"),
    ),
)


def sources_of(package: str, work: Path, checkout: Path | None = None) -> tuple[Path, str]:
    """A folder with the sources of the installed version, with its tests; downloaded where it is not in `work`.

    diffusers' archive in the registry holds no tests of models: they come from its repository's tag.

    checkout: of diffusers, one that is there already

    Returns: the folder, and what it is.
    Raises: subprocess.CalledProcessError where it cannot be had.
    """
    version = importlib.metadata.version(package)
    if package == "diffusers":
        folder = checkout or work / f"diffusers-{version}"
        if not folder.exists():
            command = ["git", "clone", "--depth", "1", "--branch", f"v{version}", DIFFUSERS, str(folder)]
            subprocess.run(command, check=True)
        whose = "" if checkout is None else f", tests of {commit_of(checkout) or checkout.name}"
        return folder, f"{package} {version}{whose}"
    folder = work / f"{package.replace('-', '_')}-{version}"
    if not folder.exists():
        wanted = ["--no-binary", ":all:", "--no-deps", "-d", str(work), f"{package}=={version}"]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *wanted], check=True)
        with tarfile.open(work / f"{folder.name}.tar.gz") as archive:
            if hasattr(tarfile, "data_filter"):  # not in the first releases of Python 3.10 and 3.11
                archive.extraction_filter = tarfile.data_filter
            archive.extractall(work)
    return folder, f"{package} {version}"
