"""The program that plays episodes of a verifiers environment. It runs under the Python that has verifiers,
which need not have Outrider: nothing of Outrider is imported here, and siblings by relative imports.
"""
