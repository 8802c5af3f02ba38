"""A run on several processes (extra ``cluster``): trainer ranks as Ray actors, weights in shards by FSDP2.

Only this package imports ray. Without ``[cluster]`` nothing of it is loaded.
"""
