"""Attention for Hopper: TMA, warp specialization, `wgmma`."""
