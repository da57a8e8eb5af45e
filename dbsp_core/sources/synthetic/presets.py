"""Statistics of synthetic masks, and presets that are fitted to the paper's Table 1."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dbsp_core.models.table import MODEL_SPECS, ModelSpec
from dbsp_core.utils.errors import bad_value

__all__ = ["DEFAULT_STYLE", "PRESETS", "MaskStyle", "Preset"]


@dataclass(frozen=True)
class MaskStyle:
    """Statistics of synthetic masks.

    Attributes:
        density: Mean share of dense blocks over the heads of a layer, met exactly.
        spread: Standard deviation of the profiles of rows and columns, in logits.
        head_concentration: α + β of the Beta distribution of head densities; the smaller, the more heads differ.
        profile_correlation: Correlation of the row and column profiles of two heads of a layer.
        layer_similarity: Correlation of the profiles that two layers' heads share.
        pattern_strength: Height of a head's pattern over the background, in logits.
        drift: Share of a mask that is drawn again from one step to the next; 0 makes masks static.

    Raises:
        SettingError: For values out of range.
    """

    density: float
    spread: float
    head_concentration: float
    profile_correlation: float = 0.9
    layer_similarity: float = 0.5
    pattern_strength: float = 4.0
    drift: float = 0.0

    def __post_init__(self) -> None:
        for name in ("density", "profile_correlation", "layer_similarity", "drift"):
            if not 0 <= getattr(self, name) <= 1:
                raise bad_value(self, name, "must lie between 0 and 1")
        for name, most in (("spread", 5), ("pattern_strength", 10)):
            if not 0 <= getattr(self, name) <= most:
                raise bad_value(self, name, f"must lie between 0 and {most} (logits)")
        if not self.head_concentration > 0:
            raise bad_value(self, "head_concentration", "must be positive; 10 makes heads similar")


@dataclass(frozen=True)
class Preset:
    """A model as the paper ran it, and the style of its masks."""

    model: ModelSpec
    style: MaskStyle
    block_q: int = 64
    block_k: int = 64


DEFAULT_STYLE = MaskStyle(density=0.4, spread=0.6, head_concentration=8.0)

# Fitted by scripts/reproduce/presets.py; docs/masks-synthetic.md says to what, and how well the rest agrees.
_WAN = Preset(MODEL_SPECS["wan2.1-t2v-14b"], MaskStyle(density=0.414, spread=0.432, head_concentration=3.8))
_COGVIDEOX = Preset(MODEL_SPECS["cogvideox1.5-5b"], MaskStyle(density=0.414, spread=0.643, head_concentration=1.54))


def _sparge(preset: Preset, head_concentration: float, drift: float) -> Preset:
    """The same model under SpargeAttn: masks change from step to step, in blocks of 128 queries and 64 keys."""
    style = replace(preset.style, head_concentration=head_concentration, drift=drift)
    return replace(preset, block_q=128, style=style)


PRESETS: dict[str, Preset] = {
    "wan2.1-t2v-14b": _WAN,
    "cogvideox1.5-5b": _COGVIDEOX,
    "wan2.1-t2v-14b-sparge": _sparge(_WAN, head_concentration=2.18, drift=0.015),
    "cogvideox1.5-5b-sparge": _sparge(_COGVIDEOX, head_concentration=0.78, drift=0.015),
}
"""Presets by the name after `preset:` in a configuration: PAROAttention's static masks unless -sparge."""
