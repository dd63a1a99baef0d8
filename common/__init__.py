"""What processes of every kind are built with. Imports `protos` and nothing else of headrace."""
