"""Whether a call was cold, and what made it so: a ring of what was compiled, tuned, loaded or initialised.

One file for each runtime; none imports its runtime, and a hot call pays for none of them.
"""
