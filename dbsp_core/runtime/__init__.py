"""Running attention: sessions, plan reuse, kernel tables, exchanges and gradients."""
