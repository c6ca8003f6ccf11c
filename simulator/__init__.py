"""What happens when a pipeline plan's actions run: time and memory, by the contract.

The package knows no torch, no solver and no files. Import from its modules directly:
`simulator.actions`, `simulator.costs`, `simulator.engine`, `simulator.timeline`.
"""
