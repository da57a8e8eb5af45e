"""Between tokens and packed blocks: row bits, copies of token segments, pooled blocks."""
