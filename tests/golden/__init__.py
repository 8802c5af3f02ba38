"""The golden record: every algorithm and preset in runs of three steps, of which no bit may change
(docs/portability.md).
"""
