"""Keeps keys and values between steps: `paged.PagedCache`, and a kernel that appends to a cache."""
