"""What is known of a program before it runs: arguments, variables, operators, placement and memory."""
