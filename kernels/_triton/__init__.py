"""Jitted code, and the list of its variants; the launchers beside this folder check and document what it is given."""
