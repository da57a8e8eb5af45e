"""One transformer's attentions: what plans and executors each gets, and how long they are kept."""
