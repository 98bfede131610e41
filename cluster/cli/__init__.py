"""The `genlock` command. Answers go to stdout, progress to stderr."""
