"""db-SP in LightX2V: attention "dbsp", which LightX2V finds by entry point `lightx2v.platform_plugins`."""
