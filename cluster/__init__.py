"""Gateway, router, configuration, launch and command line of a Genlock cluster."""
