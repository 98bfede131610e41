"""`python -m sim`."""

from sim.cli import sim_command

if __name__ == "__main__":
    sim_command()
