"""db-SP in serving engines, which find it by entry points: vLLM-Omni, SGLang Diffusion, LightX2V."""
