"""Offload: activations and optimizer state on the host while a step does not need them.

    run           asked at each action: what to wait for, what leaves, what comes back
    planned       what the plan's simulated step says of copies
    room          whether actions and reloads find the memory that the plan has for them
    saved         which storages autograd saved may leave; `saved_watch` counts those that live
    lanes         copies beside compute, as fast as the link: `thread_lane`, `cuda_lane`
    host_pool     where they go; `host_book` is what the ranks of one host share
    state         the optimizer's state, on the same lane

PipeOffload (ICML'25), section 4.
"""
