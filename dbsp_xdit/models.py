"""Which models db-SP runs in xDiT, and local checkpoint folders, which xfuser itself does not take."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from dbsp_core.config import DbspConfig

__all__ = ["make_model_known", "require_model"]

REGISTERED = ("Wan-AI/Wan2.1-T2V-14B-Diffusers", "Wan2.1-T2V")
"""Names in xfuser's own registry."""


def require_model(name: str) -> None:
    """Raises ValueError unless `name` is a model that db-SP runs: a registered name, or a local Wan2.1 folder."""
    if name in REGISTERED:
        return
    folder = Path(name)
    if not folder.is_dir():
        looks_local = name.startswith((".", os.sep, "~")) or name.count("/") > 1
        fault = "that folder does not exist" if looks_local else "db-SP does not know that name"
        raise ValueError(
            f"--model {name}: {fault}; use {' or '.join(REGISTERED)}, or a local checkpoint folder of Wan2.1"
        )
    index = folder / "model_index.json"
    if not index.is_file():
        raise ValueError(
            f"--model {name}: the folder has no model_index.json; give the folder that holds it, as save_pretrained "
            "writes it (dbsp tiny wan DIR makes a small one)"
        )
    try:
        parts = json.loads(index.read_text())
        pipeline = parts["_class_name"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"--model {name}: model_index.json is not a pipeline index; download the folder again"
        ) from error
    if pipeline != "WanPipeline" or (parts.get("transformer_2") or [None])[0] is not None:
        raise ValueError(
            f"--model {name}: db-SP runs WanPipeline with one transformer (Wan2.1 text-to-video) in xDiT, this is "
            f"{pipeline}{' with two' if pipeline == 'WanPipeline' else ''}; use --sp-backend usp for it"
        )


def make_model_known(name: str, config: DbspConfig) -> None:
    """Checks the model, and puts a local folder into xfuser's registry. Raises ValueError as `require_model` does."""
    require_model(name)
    if name in REGISTERED:
        return
    import xfuser.model_executor.models.runner_models  # noqa: F401  fills the registry
    from xfuser.model_executor.models.runner_models.base_model import MODEL_REGISTRY

    MODEL_REGISTRY[name] = _local_wan(name, _dtype(config.dtype))


def _dtype(name: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if torch.accelerator.is_available() else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _local_wan(folder: str, dtype: torch.dtype) -> type:
    """A runner model for one local folder: xfuser's own for Wan2.1, told where its weights are."""
    from xfuser.model_executor.models.runner_models.wan import xFuserWan21T2VModel

    class LocalWanModel(xFuserWan21T2VModel):
        def _customize_settings(self, config: Any) -> None:
            super()._customize_settings(config)
            self.settings.model_name = folder

        def _load_model(self) -> Any:
            if dtype == torch.bfloat16:  # all of xfuser's ways to load are for this dtype
                return super()._load_model()
            from diffusers import WanPipeline
            from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper

            transformer = xFuserWanTransformer3DWrapper.from_pretrained(
                folder, subfolder="transformer", torch_dtype=dtype, attention_kwargs={"thw": None}
            )
            return WanPipeline.from_pretrained(folder, torch_dtype=dtype, transformer=transformer)

    return LocalWanModel
