"""The simulator: the real scheduler, prefix index and policy on a virtual clock, with a cost model for the kernels."""
