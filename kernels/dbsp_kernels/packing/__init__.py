"""Between tokens and packed blocks: row bits, and copies of token segments."""
