"""A run on several processes (extra ``cluster``): trainer ranks as Ray actors, weights in shards by FSDP2.

Only this package imports ray. Without ``[cluster]`` nothing of it is loaded. It has more than 3,000 lines
since vLLM's processes, GPUs and what takes the place of processes that are gone are in it as well.
"""
