"""Start processes: plan them for this machine, place them on its cores, and keep them alive."""
