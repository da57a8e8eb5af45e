"""vLLM-Omni's own entry on CPUs, from a prompt to a file of frames: it ships no command but its server's.

python -m scripts.checks.engines.vllm_omni_command FOLDER PROMPT FRAMES OPTIONS SAMPLING

OPTIONS are `Omni`'s and SAMPLING its request's, in JSON. FRAMES gets float32 [frames, height, width, 3], 0 to 255.

Replaced: the platform, with the stream of its workers (`vllm_omni_platform`); torchvision, which is only imported.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from scripts.checks.engines.reference import stub_for_torchvision

stub_for_torchvision()  # workers import this module again, as spawned processes do


def main() -> None:
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    model, prompt, file, options, sampling = sys.argv[1:]
    omni = Omni(model=model, **json.loads(options))
    (output,) = omni.generate(prompt, OmniDiffusionSamplingParams(**json.loads(sampling)))
    omni.close()
    np.save(file, np.asarray(output.images[0][0], dtype=np.float32) * 255)


if __name__ == "__main__":
    main()
