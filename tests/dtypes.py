"""Marks float32 as a parameter of tests."""

import pytest
import torch

# In 16 bits a result's own rounding hides which library multiplied: distances from float64, as
# shares of their budgets, differ by 0.002 at most between OpenBLAS's kernels, in float32 by 0.99.
FLOAT32 = pytest.param(torch.float32, marks=pytest.mark.blas)
