"""How a comparison is shown: as plain data, as a table for a terminal, as a data frame, as a page with plots.

Nothing here measures or judges: what is not in the nouns of ``arms.py`` is not shown.
"""
