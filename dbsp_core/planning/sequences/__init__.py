"""Several sequences at once: which ranks share each sequence, and how evenly. Only numpy."""
