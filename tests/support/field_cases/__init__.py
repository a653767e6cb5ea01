"""The 25 field cases by theme; `tests/test_field_cases.py` runs them and holds them to the list.

rows.py says which rows must run, judging.py how one is run; a case is a function of the rest.
"""
