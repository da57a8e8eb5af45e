"""Checks of a configuration and a checkpoint before any weight is loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from dbsp_core.config import DbspConfig
from dbsp_core.cost.machine import load_hardware
from dbsp_core.utils.errors import UserError, blame_setting
from dbsp_diffusers.checkpoint import Checkpoint
from dbsp_kernels import choose_kernel

_ANSWER_S = 10.0


def require_possible(config: DbspConfig) -> None:
    """Raises SettingError for settings that are not supported on this computer, or with these masks."""
    if config.transformer_2:
        with blame_setting("transformer_2"):
            require_possible(config.for_transformer("transformer_2"))
    with blame_setting("kernel"):
        choose_kernel(config.kernel, "cuda" if torch.cuda.is_available() else "cpu", config.generate.torch_dtype)
    if config.machine is not None:
        with blame_setting("machine"):
            load_hardware(config.machine)


def require_checkpoint(model: str | None, *, ask_hub: bool = True) -> None:
    """Raises UserError for a checkpoint that cannot be loaded; None passes.

    That is a folder that lacks files, and what is here that has code of its own, or is damaged.

    Args:
        ask_hub: True to reject a repository that is neither here nor to be had; False if it may be had later.
    """
    checkpoint = None if model is None else local_checkpoint(model)
    if checkpoint is not None:
        checkpoint.require_readable()
    if model is None or (checkpoint is not None and not checkpoint.missing):
        return
    missing = () if checkpoint is None else checkpoint.missing
    lacks = f"lacks {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}" if missing else "is not"
    if Path(model).is_dir():
        raise UserError(f"checkpoint {model} {lacks}; download it again, whole")
    if not ask_hub:
        return
    from huggingface_hub import HfApi, constants

    try:
        HfApi().model_info(model, timeout=_ANSWER_S)
    except Exception as error:  # of whichever library answers for the network
        reason = (str(error).strip(" .\n").splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"checkpoint {model} {lacks} in {constants.HF_HUB_CACHE}, and "
            f"{constants.ENDPOINT} does not give it "
            f"({reason}); download it where there is a network (hf download {model}) and give its folder with "
            "--model, or name the cache that has it with HF_HUB_CACHE"
        ) from error


def local_checkpoint(model: str) -> Checkpoint | None:
    """Returns the checkpoint of this folder, or of this repository in Hugging Face's cache, whole or not, or None."""
    folder = Path(model) if Path(model).is_dir() else cached_checkpoint(model)
    return None if folder is None else Checkpoint.read(folder)


def cached_checkpoint(repository: str, file: str = "model_index.json") -> Path | None:
    """Returns the folder in Hugging Face's cache that has this file of a repository, whole or not."""
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(repository, file)
    except (ImportError, ValueError):  # not a name of a repository
        return None
    return Path(path).parent if isinstance(path, str) else None
