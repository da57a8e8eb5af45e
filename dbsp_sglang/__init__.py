"""db-SP in SGLang Diffusion, which finds it by entry point `sglang.multimodal_gen.plugins`."""
