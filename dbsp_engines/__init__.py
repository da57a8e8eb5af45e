"""Plug-ins for serving engines, found by entry points: vLLM-Omni, SGLang Diffusion, LightX2V."""
