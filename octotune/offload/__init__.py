"""Offload: which activations leave for the host, when, and what order of actions makes that pay.

`kernel` plays an order of actions and a copy lane together within memory, `planning` plans copies
for a schedule as it is, `scheduling` bends the order where copies alone do not suffice, `search`
looks for the best of both, and recompute, and `usage` says what the copies of a plan did.
"""
