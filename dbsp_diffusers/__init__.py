"""What all hosts of diffusers' transformers share: patches, sharding, checks, the configuration in effect."""
