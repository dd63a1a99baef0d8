"""States of recurrent layers: the slots that hold them, and their assignment to requests."""
