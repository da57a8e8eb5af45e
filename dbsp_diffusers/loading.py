"""Loads diffusers' own pipeline of a checkpoint."""

from __future__ import annotations

from typing import Any

from dbsp_core.models.signature import ModelSignature
from dbsp_core.utils.errors import UserError, cut_short
from dbsp_diffusers.preflight import local_checkpoint


def load_stock_pipeline(
    model: str,
    identity: ModelSignature | None,
    *,
    from_image: bool,
    flow_shift: float | None,
    cls: str = "DiffusionPipeline",
    **options: Any,
) -> Any:
    """Loads a pipeline, in the variant that its files have, with another shift of its scheduler where it has one.

    Args:
        model: Folder or repository.
        identity: The model, or None if it is not known.
        from_image: True if it starts from an image: checkpoints of Wan2.2 TI2V name the class that does not.
        flow_shift: None leaves the checkpoint's.
        cls: diffusers' class; the default takes the one that the checkpoint names.
        options: Further arguments of `from_pretrained`.

    Raises:
        UserError: Its files cannot be loaded.
    """
    import diffusers

    if from_image and identity is not None and identity.variant == "ti2v":
        cls = "WanImageToVideoPipeline"
    checkpoint = local_checkpoint(model)
    variant = None if checkpoint is None else checkpoint.variant
    try:
        pipe = getattr(diffusers, cls).from_pretrained(model, variant=variant, **options)
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {model} cannot be loaded: {cut_short(' '.join(str(error).split()))}") from error
    if flow_shift is not None and "flow_shift" in pipe.scheduler.config:
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=flow_shift)
    return pipe
