"""The transformer classes that db-SP knows, those that it does not support, and how others are registered."""

from __future__ import annotations

from torch import nn

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.image_models import IMAGE_MODELS
from dbsp_diffusers.models.video_models import VIDEO_MODELS
from dbsp_kernels.errors import page

ARCHITECTURES: dict[str, Architecture] = {**VIDEO_MODELS, **IMAGE_MODELS}
"""Architectures by class name: diffusers need not be imported to look one up."""

_CACHE = "it attends to keys of earlier chunks, which it keeps"
_IMAGE = f"it makes images, whose attention is short, and has no entry yet; see {page('adding-a-model')}"
_LINEAR = "its attention is linear, without a softmax that a mask could apply to"
_NABLA = "it brings a sparse mask of its own (NABLA), and has no entry yet"
_PART = "it is a part of a U-Net, whose other layers mix tokens too"
_SOUND = "it makes sound, of few tokens"

UNSUPPORTED = {
    # Videos.
    "AllegroTransformer3DModel": "its rotary tables and positions are in one list, of which db-SP cannot cut a part",
    "AnyFlowFARTransformer3DModel": "its attention has a causal mask of its own",
    "Cosmos3OmniTransformer": "its layers attend twice, once by a causal mask",
    "HeliosTransformer3DModel": "it cuts and gathers its sequence at every layer",
    "Kandinsky6SRTransformer3DModel": _NABLA,
    "Kandinsky6Transformer3DModel": "audio and video attend to each other in one module, and it has no entry yet",
    "LatteTransformer3DModel": "it attends alternately within frames and between them, to few tokens each time",
    "MochiTransformer3DModel": "its attention leaves out padding itself, one item of a batch after another",
    "MotifVideoTransformer3DModel": "its last layers attend over the video's tokens twice",
    "SanaVideoTransformer3DModel": _LINEAR,
    "SanaWMLTX2RefinerTransformer3DModel": _CACHE,
    "SanaWMTransformer3DModel": _LINEAR,
    "WanAnimate2Transformer3DModel": "its attention has a mask of its own, and keys of references that it keeps",
    # Images.
    "AuraFlowTransformer2DModel": _IMAGE,
    "BriaFibo2Transformer2DModel": _IMAGE,
    "BriaFiboTransformer2DModel": _IMAGE,
    "BriaTransformer2DModel": _IMAGE,
    "ChromaTransformer2DModel": _IMAGE,
    "CogView3PlusTransformer2DModel": _IMAGE,
    "CogView4Transformer2DModel": _IMAGE,
    "DiTTransformer2DModel": _IMAGE,
    "GlmImageTransformer2DModel": _IMAGE,
    "HiDreamImageTransformer2DModel": _IMAGE,
    "HunyuanDiT2DModel": _IMAGE,
    "Ideogram4Transformer2DModel": _IMAGE,
    "JoyImageEditPlusTransformer3DModel": _IMAGE,
    "JoyImageEditTransformer3DModel": _IMAGE,
    "Lumina2Transformer2DModel": _IMAGE,
    "LuminaNextDiT2DModel": _IMAGE,
    "NucleusMoEImageTransformer2DModel": _IMAGE,
    "OmniGenTransformer2DModel": _IMAGE,
    "PRXTransformer2DModel": _IMAGE,
    "PixArtTransformer2DModel": _IMAGE,
    "QwenImage21Transformer2DModel": "text and images attend by a causal mask of its own",
    "SD3Transformer2DModel": _IMAGE,
    "SanaTransformer2DModel": _LINEAR,
    # Neither.
    "AceStepTransformer1DModel": _SOUND,
    "DreamLiteTransformer2DModel": _PART,
    "DualTransformer2DModel": _PART,
    "LongCatAudioDiTTransformer": _SOUND,
    "MiniMaxMusic3RVQDepthDecoder": _SOUND,
    "MiniMaxMusic3Transformer1DModel": _SOUND,
    "PriorTransformer": "it makes one embedding",
    "RFD4ProteinaTransformer": "it makes proteins",
    "StableAudio3DiTModel": _SOUND,
    "StableAudioDiTModel": _SOUND,
    "T5FilmDecoder": _SOUND,
    "Transformer2DModel": _PART,
    "TransformerTemporalModel": _PART,
}
"""Why each class is not run, by name; `register_architecture` makes one known in spite of it."""


def register_architecture(class_name: str, architecture: Architecture) -> None:
    """Registers a transformer class, also one that is otherwise not supported; see docs/adding-a-model.md.

    Args:
        class_name: The name of the class; its subclasses are known with it.
        architecture: Data that db-SP needs of it.

    Raises:
        UserError: For a name that is known already, with another architecture.
    """
    if ARCHITECTURES.setdefault(class_name, architecture) != architecture:
        raise UserError(f"{class_name} is known already, with other settings; register a subclass under another name")


def known_architecture(transformer: nn.Module) -> Architecture | None:
    """Returns the architecture of a transformer or of a class it derives from, whether it is supported or not."""
    names = (cls.__name__ for cls in type(transformer).__mro__)
    return next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)


def architecture_of(transformer: nn.Module) -> Architecture:
    """Returns the architecture of a transformer or of a class it derives from. Raises UserError if not supported."""
    kind = type(transformer).__name__
    for cls in type(transformer).__mro__:
        if cls.__name__ in ARCHITECTURES:
            architecture = ARCHITECTURES[cls.__name__]
            reason = architecture.unsupported(transformer)
            if reason is not None:
                raise UserError(f"db-SP does not run this {kind}: {reason}")
            return architecture
        if cls.__name__ in UNSUPPORTED:
            raise UserError(f"db-SP does not run {kind}: {UNSUPPORTED[cls.__name__]}")
    raise UserError(
        f"db-SP does not know {kind}; it knows {', '.join(ARCHITECTURES)} and their subclasses; "
        f"others of their kind need one entry: {page('adding-a-model')}"
    )
