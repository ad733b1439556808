"""Pictures of result files. Needs matplotlib (the extra "plots")."""
