"""See the package."""

from slime_like.agents.function_program import main

main()
