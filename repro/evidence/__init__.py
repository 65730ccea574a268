"""Evidence: records of what ran, expectations of what should come out, and verdicts between them.

Standard library only, but for scipy's distributions: checking and reporting need neither torch nor
the machine that ran.
"""
