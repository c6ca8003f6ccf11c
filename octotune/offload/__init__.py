"""Offload: which activations leave for the host, when, and what order of actions makes that pay.

planning    copies for a schedule as it is, or bent where copies alone do not suffice
  play      an order of actions and a copy lane (`lane`) together within memory (`pages`)
search      the best of copies, order and recompute: plays (`bench`) of plans to begin from
            (`starts`, `uniform`), changed one thing at a time (`moves`)
joint       when the tuner does all this, and from what
usage       what the copies of a plan did; `measured`: what they did in real steps
"""
