"""`dbsp tiny`: diffusers pipelines made offline in seconds, for trying things out and for tests.

With random weights the video is noise, which is enough to test exactness. The trained Wan shows moving shapes; it is
in db-SP's repository, but not in the package. Needs diffusers, transformers and tokenizers.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
import typer
from safetensors import SafetensorError

from dbsp_cli.output import PATH
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import TEMPORARY, require_path
from dbsp_kernels.errors import install_command

_WEIGHTS = Path("scripts", "training", "weights")
_TEXT_ENCODER = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def make_tiny(model: str, folder: Path) -> Path:
    """Writes a tiny pipeline of MAKERS in float32 to `folder` atomically, and returns the folder.

    Raises UserError if the model is unknown, its weights are missing, or the folder has other content.
    """
    if model not in MAKERS:
        raise UserError(f"unknown tiny model {model!r}; use one of {', '.join(MAKERS)}")
    folder = Path(folder)
    taken = folder.exists() and not (folder / "model_index.json").is_file()
    if taken and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not a checkpoint; give a new folder, or an old checkpoint's")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=TEMPORARY) as temporary:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                MAKERS[model]().save_pretrained(Path(temporary) / "new")
            except SafetensorError as error:  # damaged weights or a full disk
                raise OSError(f"the tiny checkpoint {folder} cannot be made: {error}") from error
        if folder.exists():
            shutil.move(folder, Path(temporary) / "old")
        shutil.move(Path(temporary) / "new", folder)
    return folder


def trained_weights() -> Path:
    """Returns the folder of the trained Wan (half precision) in db-SP's checkout or below the current folder."""
    for checkout in (Path(__file__).resolve().parents[1], Path.cwd()):
        if (checkout / _WEIGHTS / "model_index.json").is_file():
            return checkout / _WEIGHTS
    raise UserError(
        "the trained tiny model is in db-SP's repository, not in its package; run this in a clone of "
        "https://github.com/db-sp/db-sp, or take tiny-wan, whose weights are random"
    )


def silence_libraries() -> None:
    """Disables progress bars and deprecation notices of libraries."""
    import diffusers
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning, module="diffusers")
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()


def _trained_wan() -> Any:
    from diffusers import WanPipeline

    return WanPipeline.from_pretrained(trained_weights(), torch_dtype=torch.float32, local_files_only=True)


def _wan(
    pipeline: str = "WanPipeline",
    transformer: str = "WanTransformer3DModel",
    two: bool = False,
    parts: Mapping[str, Any] = MappingProxyType({}),
    **sizes: Any,
) -> Any:
    """Makes a Wan pipeline with one or two transformers of 4 layers with 12 heads."""
    import diffusers
    from transformers import UMT5Config, UMT5EncoderModel

    tokenizer = _tokenizer(max_length=512)
    text_encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **_TEXT_ENCODER))
    vae = diffusers.AutoencoderKLWan(base_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    usual = {"num_layers": 4, "num_attention_heads": 12, "attention_head_dim": 24, "text_dim": 32}
    usual |= {"freq_dim": 64, "ffn_dim": 256, "rope_max_seq_len": 128}
    make_transformer = partial(getattr(diffusers, transformer), **usual | sizes)
    transformers = {"transformer": make_transformer()}
    if two:  # the second for low noise
        transformers |= {"transformer_2": make_transformer(), "boundary_ratio": 0.875}
    return getattr(diffusers, pipeline)(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, scheduler=scheduler, **transformers, **parts
    )


def _wan_i2v() -> Any:
    """Makes Wan2.1 image-to-video, with the image in extra channels and as CLIP embedding in cross-attention."""
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    encoder = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=32, patch_size=8))
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    parts = {"image_encoder": encoder, "image_processor": processor}
    return _wan("WanImageToVideoPipeline", parts=parts, in_channels=36, image_dim=20, added_kv_proj_dim=12 * 24)


def _cogvideox() -> Any:
    """Makes CogVideoX1.5 text-to-video: 2 layers, 6 heads, joint text of 226 tokens; needs 8k + 1 frames."""
    import diffusers
    from transformers import T5Config, T5EncoderModel

    tokenizer = _tokenizer(max_length=226)
    text_encoder = T5EncoderModel(T5Config(vocab_size=len(tokenizer), **_TEXT_ENCODER))
    vae = diffusers.AutoencoderKLCogVideoX(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2)
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=6,
        attention_head_dim=16,
        time_embed_dim=32,
        text_embed_dim=32,
        num_layers=2,
        sample_height=90,
        sample_frames=9,
        patch_size_t=2,
        patch_bias=False,
        use_rotary_positional_embeddings=True,
    )
    return diffusers.CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )


def _tokenizer(max_length: int) -> Any:
    """Makes a fixed tokenizer of letters and some words (training one is not deterministic)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = "▁abcdefghijklmnopqrstuvwxyz0123456789,.!?'-"
    prompts = "red ball bounces over blue floor cat runs on the grass the sea at dusk seen from above"
    words = sorted(set(prompts.split()))
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = [*special, *((letter, -8.0) for letter in letters), *((f"▁{word}", -6.0) for word in words)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=max_length,
    )


MAKERS: dict[str, Callable[[], Any]] = {
    "wan": _wan,
    "wan-trained": _trained_wan,
    "wan2.2": partial(_wan, two=True),
    # a timestep per token; from text, or with a first frame
    "wan-ti2v": partial(_wan, parts={"expand_timesteps": True}),
    "wan-i2v": _wan_i2v,
    # 2 of the 4 layers take a control video
    "wan-vace": partial(_wan, "WanVACEPipeline", "WanVACETransformer3DModel", vace_layers=[0, 2], vace_in_channels=96),
    "cogvideox": _cogvideox,
}
"""Makers of the models of `dbsp_core.models.table.TINY_MODELS`."""


def tiny_command(
    model: Annotated[str, typer.Argument(help=f"Architecture: {', '.join(MAKERS)}.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write; replaces a tiny checkpoint there.", **PATH)],
) -> None:
    """Make a tiny checkpoint with random or trained weights, for trying things out offline."""
    require_path(folder, "FOLDER")
    try:
        silence_libraries()
        make_tiny(model, folder)
    except ImportError as error:
        raise UserError(f"{error.name} is needed to make checkpoints; {install_command('diffusers')}") from error
    print(f"wrote a tiny {model} checkpoint to {folder}", file=sys.stderr)
