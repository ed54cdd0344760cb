"""Holds attention for Hopper: TMA, warp specialization, `wgmma`."""
