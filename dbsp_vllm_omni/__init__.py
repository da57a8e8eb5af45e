"""db-SP in vLLM-Omni: attention backend DBSP, which vLLM-Omni finds by entry point `vllm_omni.general_plugins`."""
