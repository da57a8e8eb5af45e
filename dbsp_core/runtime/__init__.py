"""Attention at run time: plans kept from call to call, kernel tables, the ring."""
