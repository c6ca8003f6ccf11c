"""Fill jobs: independent work inside the bubbles that a plan leaves.

`jobs` are the jobs as values and files, `models` ready ones made from published shapes, `bubbles`
what a plan leaves on each device, `packing` which micro-steps run in which bubble, `policies` who
gets a free device, `plan` all of it in one file, and `traces` and `fleet` days of many replicas.

Source:
    Arfeen et al. 2024, "PipeFill: Using GPUs During Bubbles in Pipeline-parallel LLM Training",
    arXiv:2410.07192.
"""
