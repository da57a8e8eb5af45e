"""Tiny checkpoints: complete pipelines, made offline in seconds, for demonstrations and tests.

They have the real architectures (diffusers' own classes), so that frameworks run their real code. Random weights prove
exactness and nothing else: the video is noise. The trained ones, which ship with db-SP, show a small world of shapes
that move (weights/tiny-wan/README.md). Needs diffusers, transformers and tokenizers (extras "xdit" or "para").
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import TEMPORARY, read_text

TRAINED_WAN = Path(__file__).parent / "weights" / "tiny-wan"
"""The trained pipeline, in half precision, with its card."""

_TEXT_ENCODER = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_CORPUS = ["a red ball bounces over a blue floor", "a cat runs on the grass", "the sea at dusk, seen from above"]


def make_tiny(model: str, folder: Path, seed: int = 0) -> Path:
    """Writes a tiny pipeline in float32 to `folder`, which appears complete or not at all, and returns the folder.

    Args:
        model: A key of MAKERS.
        seed: Seed of random weights.

    Raises:
        UserError: The model is unknown, or the folder holds something else.
    """
    if model not in MAKERS:
        raise UserError(f"unknown tiny model {model!r}; use one of {', '.join(MAKERS)}")
    folder = Path(folder)
    taken = folder.exists() and not (folder / "model_index.json").is_file()
    if taken and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not a checkpoint folder; give a new folder, or an old checkpoint's")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=TEMPORARY) as temporary:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                MAKERS[model]().save_pretrained(Path(temporary) / "new")
            except SafetensorError as error:  # of the shipped weights, or a disk that is full
                raise OSError(f"the tiny checkpoint {folder} cannot be made: {error}") from error
        if MAKERS[model] is _trained_wan:
            shutil.copy(TRAINED_WAN / "README.md", Path(temporary) / "new")
        if folder.exists():
            shutil.move(folder, Path(temporary) / "old")
        shutil.move(Path(temporary) / "new", folder)
    return folder


def unknown_words(folder: Path, prompt: str) -> str | None:
    """Says which words of a prompt a tokenizer of whole words does not know; None for none, or other tokenizers."""
    try:
        model = json.loads(read_text(folder / "tokenizer" / "tokenizer.json"))["model"]
        known = dict.fromkeys(word for word in model["vocab"] if word.isalpha())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    unknown = dict.fromkeys(word for word in re.findall(r"\w+|[^\w\s]+", prompt) if word not in known)
    if model.get("type") != "WordLevel" or not unknown:
        return None
    return f"the prompt has words that this model has never seen: {', '.join(unknown)}; it knows {', '.join(known)}"


def silence_libraries() -> None:
    """Turns off the libraries' own progress bars and deprecation notices, for a process that has bars of its own."""
    import diffusers
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning, module="diffusers")
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()


def _trained_wan() -> Any:
    """Loads the weights that ship with db-SP, which scripts/train_tiny makes."""
    from diffusers import WanPipeline

    return WanPipeline.from_pretrained(TRAINED_WAN, torch_dtype=torch.float32, local_files_only=True)


def _wan_parts(transformer: str = "WanTransformer3DModel", **sizes: Any) -> dict[str, Any]:
    """Returns the parts of Wan's pipelines. The transformer has 4 layers with 12 heads."""
    import diffusers
    from transformers import UMT5Config, UMT5EncoderModel

    tokenizer = _tokenizer(max_length=512)
    text_encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **_TEXT_ENCODER))
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "vae": vae,
        "transformer": _wan_transformer(transformer, **sizes),
        "scheduler": scheduler,
    }


def _wan_transformer(cls: str = "WanTransformer3DModel", **sizes: Any) -> Any:
    import diffusers

    usual = {
        "num_attention_heads": 12,
        "attention_head_dim": 24,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 32,
        "freq_dim": 64,
        "ffn_dim": 256,
        "num_layers": 4,
        "rope_max_seq_len": 128,
    }
    return getattr(diffusers, cls)(**usual | sizes)


def _pipeline(cls: str, **parts: Any) -> Any:
    import diffusers

    return getattr(diffusers, cls)(**parts)


def _wan_i2v() -> Any:
    """Makes Wan2.1 image-to-video: the image joins the noise as channels, and cross-attention as CLIP's embedding."""
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    encoder = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=32, patch_size=8))
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    parts = _wan_parts(in_channels=36, image_dim=20, added_kv_proj_dim=12 * 24)
    return _pipeline("WanImageToVideoPipeline", **parts, image_encoder=encoder, image_processor=processor)


def _cogvideox() -> Any:
    """Makes CogVideoX1.5 text-to-video: 2 layers, 6 heads, joint text of 226 tokens; wants 8k + 1 frames."""
    import diffusers
    from transformers import T5Config, T5EncoderModel

    tokenizer = _tokenizer(max_length=226)
    text_encoder = T5EncoderModel(T5Config(vocab_size=len(tokenizer), **_TEXT_ENCODER))
    vae = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=16,
        layers_per_block=1,
        norm_num_groups=2,
    )
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=6,
        attention_head_dim=16,
        in_channels=16,
        out_channels=16,
        time_embed_dim=32,
        text_embed_dim=32,
        num_layers=2,
        sample_width=90,
        sample_height=90,
        sample_frames=9,
        patch_size=2,
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


def _hunyuan_15() -> Any:
    """Makes HunyuanVideo-1.5 text-to-video: 2 layers, 6 heads, the valid tokens of two prompts joint with video's."""
    import diffusers
    from transformers import ByT5Tokenizer, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, T5Config, T5EncoderModel

    tokenizer, glyphs = _tokenizer(max_length=1108), ByT5Tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    layers = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text_encoder = Qwen2_5_VLTextModel(
        Qwen2_5_VLTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            **layers,
            rope_parameters=rope,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        num_attention_heads=6,
        attention_head_dim=24,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=32,
        text_embed_2_dim=32,
        image_embed_dim=32,
        rope_axes_dim=(8, 8, 8),
        task_type="t2v",
    )
    return diffusers.HunyuanVideo15Pipeline(
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
        vae=diffusers.AutoencoderKLHunyuanVideo15(block_out_channels=(16, 16, 32, 32, 32), layers_per_block=1),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=T5EncoderModel(T5Config(vocab_size=len(glyphs), **_TEXT_ENCODER)),
        tokenizer_2=glyphs,
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
    )


def _tokenizer(max_length: int) -> Any:
    """Makes a tokenizer of a few dozen pieces, letters and the words of a few prompts, the same every time.

    It is not trained, since training breaks ties differently in every process.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = "▁abcdefghijklmnopqrstuvwxyz0123456789,.!?'-"
    words = sorted({f"▁{word}" for sentence in _CORPUS for word in sentence.replace(",", "").split()} - {"▁a"})
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = [*special, *((letter, -8.0) for letter in letters), *((word, -6.0) for word in words)]
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
    "wan": lambda: _pipeline("WanPipeline", **_wan_parts()),
    "wan-trained": _trained_wan,
    # a second transformer for the steps with little noise
    "wan2.2": lambda: _pipeline("WanPipeline", **_wan_parts(), transformer_2=_wan_transformer(), boundary_ratio=0.875),
    # a timestep for each token, and a video from text alone or with its first frame
    "wan-ti2v": lambda: _pipeline("WanPipeline", **_wan_parts(), expand_timesteps=True),
    "wan-i2v": _wan_i2v,
    # 2 of the 4 layers take a control video
    "wan-vace": lambda: _pipeline(
        "WanVACEPipeline", **_wan_parts("WanVACETransformer3DModel", vace_layers=[0, 2], vace_in_channels=96)
    ),
    "cogvideox": _cogvideox,
    "hunyuan1.5": _hunyuan_15,
}
"""Makers of all tiny models: `dbsp_core.models.table.TINY_MODELS`, and those that only `dbsp_diffusers` runs."""
