"""The simulator: the real scheduler, prefix index and routing policy in virtual time, with a cost model for steps."""
