"""``python -m gpuslice``: the program, where pip's folder of programs is not on PATH."""

from gpuslice.apps.cli.program import main

main()
