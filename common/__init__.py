"""Code shared by all kinds of processes. Imports only `protos` from headrace."""
