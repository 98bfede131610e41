"""Generated protobuf and gRPC code of proto/genlock/v1 (regenerate with `make proto`)."""
