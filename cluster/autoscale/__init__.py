"""How many workers of each role: a pure policy, and the traces and the model it is tried on."""
