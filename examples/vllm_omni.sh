#!/usr/bin/env bash
# vLLM-Omni serves Wan2.2 on 4 GPUs, two for heads and two for tokens, with block-sparse self-attention.
# DBSP_CONFIG names a mask, or a YAML file of settings.
export DBSP_CONFIG=sparge:cdf=0.92
vllm serve Wan-AI/Wan2.2-T2V-A14B-Diffusers --omni --usp 2 --ring 2 \
    --diffusion-attention-config.per_role.self.backend DBSP "$@"
