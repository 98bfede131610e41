"""What operators may ask of the fleet: one operation for each RPC, on a controller here or behind an endpoint."""
