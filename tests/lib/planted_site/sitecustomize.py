"""Python imports this at its start where this folder is in PYTHONPATH: see planted.py."""

import os

import planted

if os.environ.get(planted.VARIABLE):
    planted.install(os.environ[planted.VARIABLE])
