"""docs/frames.png: frames of the small trained model, dense above block-sparse, from the same seed.

In one process, which has the same videos as any number of ranks; takes a minute on a quiet machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.training.trained_model.quality import SHOWN, blocks
from scripts.training.trained_model.side_by_side import save_side_by_side
from scripts.training.trained_model.small_model import PROMPTS, generate, load_pipeline

FRAMES = Path(__file__).resolve().parents[1] / "frames.png"
PROMPT, SEED, STEPS, BLOCK = PROMPTS[1], 0, 6, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, default=FRAMES)
    options = parser.parse_args()
    pipeline = load_pipeline()
    dense, _ = generate(pipeline, PROMPT, SEED, STEPS)
    sparse, watched = generate(pipeline, PROMPT, SEED, STEPS, blocks(SHOWN[1], BLOCK))
    videos = {
        "dense attention: every block": dense.frames.movedim(1, -1),
        f"block-sparse attention: {watched.density:.0%} of the blocks": sparse.frames.movedim(1, -1),
    }
    title = "Half of the blocks, much the same video: compare the rows"
    save_side_by_side(options.picture, videos, title, f"“{PROMPT}”, as the small trained model draws it; same seed")
    print(f"wrote {options.picture}")


if __name__ == "__main__":
    main()
