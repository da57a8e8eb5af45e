#!/usr/bin/env bash
# SGLang Diffusion makes a video with Wan2.2 on 4 GPUs, two for heads and two for tokens, with block-sparse self-attention.
# DBSP_CONFIG names a mask, or a YAML file of settings. `sglang serve` takes the same, without the prompt.
export DBSP_CONFIG=sparge:cdf=0.92
sglang generate --model-path Wan-AI/Wan2.2-T2V-A14B-Diffusers --num-gpus 4 --ulysses-degree 2 --ring-degree 2 \
    --prompt "a red ball bounces over a blue checkered floor" "$@"
