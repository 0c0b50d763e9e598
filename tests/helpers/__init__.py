"""Code that several tests share: `from helpers.<module> import ...` (tests/ is on pytest's path).

Nothing is imported from conftest.py; a fixture that several folders need is built from here.
"""
