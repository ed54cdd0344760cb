"""Without an NVIDIA GPU, Triton kernels run in Triton's interpreter."""

import os

from tnp.bench.provenance import device_slug

if device_slug() == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
