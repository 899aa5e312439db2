"""Nitro inside serving engines."""
