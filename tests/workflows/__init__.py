"""Whole programs, as people write them for one device, on ranks."""
