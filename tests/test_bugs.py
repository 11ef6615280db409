"""Collects tests/bugs.py."""

from bugs import *  # noqa: F403
