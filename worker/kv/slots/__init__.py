"""The files with the slots of `disk_store`."""
