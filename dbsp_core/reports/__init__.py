"""What happened in a run: collected while it runs, gathered from all ranks when it is over, shown in several ways."""
